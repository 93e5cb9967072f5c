"""The trace of a training step, and which part of it is communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

COMMUNICATION = ("nccl", "gloo:")
"""What the names of collectives and point-to-point calls begin with, as kernels of a GPU and on a CPU."""
STEP = "mesatron step"
"""The name that the trace gives to all that was run."""

Interval = tuple[float, float]


@contextmanager
def profiled(
    file: Path, device: torch.device, meet: Callable[[], None], alive: Callable[[], None]
) -> Iterator[dict[str, float]]:
    """Trace what runs inside into `file` (.json.gz, for chrome://tracing or Perfetto).

    The scalars of `shares` stand in the dict when the context has ended. `meet` waits for all processes: a profiler's
    first start takes seconds, not the same everywhere, and the wait for the last one is no part of the step.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    figures: dict[str, float] = {}
    with profile(activities=activities) as trace:
        if on_gpu:
            torch.cuda.synchronize()
        meet()
        with record_function(STEP):
            yield figures
            if on_gpu:
                torch.cuda.synchronize()
    alive()
    file.parent.mkdir(exist_ok=True)
    trace.export_chrome_trace(str(file))
    alive()
    figures |= shares(trace.events() or [], on_gpu)


def shares(events: Sequence[Any], on_gpu: bool) -> dict[str, float]:
    """Of the STEP among `events`: its seconds, and the shares of it in which it

    computes (kernels of the GPU, operators on a CPU), communicates, and communicates while it computes nothing. To wait
    for other processes inside a collective is to communicate.
    """
    step = next(x.time_range for x in events if x.name == STEP and x.device_type == torch.autograd.DeviceType.CPU)
    seconds = (step.end - step.start) / 1e6
    work: list[Interval] = []
    sent: list[Interval] = []
    for event in events:
        if event.time_range.start < step.start:
            continue
        interval = event.time_range.start / 1e6, event.time_range.end / 1e6
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        if event.name.startswith(COMMUNICATION) and (is_kernel or not on_gpu):
            sent.append(interval)
        elif is_kernel or (not on_gpu and event.name.startswith("aten::")):
            work.append(interval)
    busy, computing, communicating = _covered(work + sent), _covered(work), _covered(sent)
    return {
        "profile/seconds": seconds,
        "profile/computing": computing / seconds,
        "profile/communicating": communicating / seconds,
        "profile/only_communicating": (busy - computing) / seconds,
    }


def describe(figures: dict[str, float]) -> str:
    """One line for the log."""
    return (
        f"{figures['profile/seconds']:.3f} s under the profiler: {figures['profile/computing']:.1%} computing, "
        f"{figures['profile/communicating']:.1%} communicating or waiting for others, of it "
        f"{figures['profile/only_communicating']:.1%} of the step with no computing beside it"
    )


def _covered(intervals: list[Interval]) -> float:
    """Length of the union."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
