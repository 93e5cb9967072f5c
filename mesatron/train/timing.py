"""Where a step's time goes, without making the GPU wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Seconds spent in named phases since the last `read`.

    On a GPU the phases are bracketed by events that are read only in `read`, so that timing forces no wait inside a
    step; elsewhere by the clock. begun: called with the name of each phase.
    """

    def __init__(self, device: torch.device, begun: Callable[[str], None] = lambda phase: None) -> None:
        self._begun = begun
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, object, object]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside this context under `name`."""
        self._begun(name)
        begin = self._mark()
        yield
        self._marks.append((name, begin, self._mark()))

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last call; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for name, begin, end in self._marks:
            elapsed = begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin  # type: ignore
            seconds[name] = seconds.get(name, 0.0) + elapsed
        self._marks.clear()
        return seconds

    def _mark(self) -> object:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
