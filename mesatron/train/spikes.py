"""Loss spikes: told from the losses before them, and undone by leaving out the data they came with. Free of torch.

A run that has seen a spike goes back to a checkpoint before it and trains on with the same data, less the global
batches of the spike. Global batches are counted over all epochs from the run's beginning, so what is left out does not
depend on the layout; it is kept in the run folder, so that every later start leaves it out too.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mesatron.config.schema import TrainConfig
from mesatron.files import replace_file

SKIPPED_FILE = "skipped-batches.json"
WINDOW, LEAST = 64, 20
"""Losses that the trend is taken of: the last WINDOW that were no spike, from LEAST on."""


class SpikeDetector:
    """Watches the loss of every step. recent: losses that an earlier detector has left in its `recent`."""

    def __init__(self, train: TrainConfig, recent: Iterable[float] = ()) -> None:
        self._sigma, self._steps = train.spike_sigma, train.spike_steps
        self._window = deque(recent, WINDOW)
        self._over = 0

    @property
    def recent(self) -> list[float]:
        """Losses of steps that were no spike, the newest last."""
        return list(self._window)

    def note(self, step: int, loss: float) -> int | None:
        """Take the loss of `step`, one after the other; the first step of a spike once it has lasted long enough."""
        if not self._sigma:
            return None
        over = False
        if len(self._window) >= LEAST:
            expected, deviation = self._trend()
            over = not loss <= expected + self._sigma * deviation  # nor is a loss that is no number
        self._over = self._over + 1 if over else 0
        if not over and math.isfinite(loss):
            self._window.append(loss)
        return step - self._over + 1 if self._over >= self._steps else None

    def describe(self, first: int, loss: float) -> str:
        """A spike that began at step `first` and now has `loss`, in a few words."""
        return (
            f"the loss, now {loss:.3f}, has been more than {self._sigma:g} standard deviations above its trend, now "
            f"{self._trend()[0]:.3f}, since step {first}"
        )

    def _trend(self) -> tuple[float, float]:
        """What the line through the window gives for the next loss, and the standard deviation of losses about it."""
        steps = range(len(self._window))
        slope, intercept = statistics.linear_regression(steps, self._window)
        rest = [loss - intercept - slope * step for step, loss in zip(steps, self._window, strict=True)]
        return intercept + slope * len(self._window), statistics.pstdev(rest)


@dataclass
class Rewind:
    """A spike from step `first_step` to `last_step` that was undone by going back to `to_step`."""

    first_step: int
    last_step: int
    to_step: int
    batches: list[int]
    sample_ids: list[int]
    attempt: str = ""
    """The one that went back; earlier versions did not note it."""


@dataclass
class Skipped:
    """What a run leaves out."""

    rewinds: list[Rewind] = field(default_factory=list)

    @property
    def batches(self) -> set[int]:
        """Numbers of the global batches, from 0 at the run's beginning."""
        return {number for rewind in self.rewinds for number in rewind.batches}

    @classmethod
    def read(cls, run_folder: Path) -> Skipped:
        """What `run_folder` says; without the file, nothing."""
        path = run_folder / SKIPPED_FILE
        return cls([Rewind(**rewind) for rewind in json.loads(path.read_text())] if path.exists() else [])

    def add(self, run_folder: Path, rewind: Rewind) -> None:
        """Leave out more. Raises DiskFullError."""
        self.rewinds.append(rewind)
        text = json.dumps([asdict(one) for one in self.rewinds], indent=1)
        replace_file(run_folder / SKIPPED_FILE, [text.encode() + b"\n"])
