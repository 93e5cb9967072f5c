"""The run's figures, written twice: TensorBoard event files and one line a step in metrics.jsonl."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from mesatron.errors import FencedError
from mesatron.files import append_file, reporting_full_disk, sync_file, sync_folder
from mesatron.monitor.records import cut_events, cut_metrics


class Monitor:
    """Writes `tensorboard/` and `metrics.jsonl` in a run folder; one process of the run has one.

    resume_step: the step of the checkpoint that the run goes on from; whatever the files hold of later steps is
    removed. 0 is a fresh start: everything is removed, step 0 (figures of the untrained model) included.

    A line of metrics.jsonl is `{"step": 12, "time": 1767225600.0, "train/loss": 4.5, ...}`: Unix seconds, and the tags
    of TensorBoard. JSON has no NaN or infinities: they are the strings "NaN", "Infinity" and "-Infinity", which
    Python's float() and most readers of numbers turn back into what they were. Raises DiskFullError.

    fence: called before anything is removed, and before figures of a further step are written; what it raises keeps the
    files as they are. Used as a context manager, the files are closed unless FencedError has been raised.
    """

    def __init__(self, run_folder: Path, resume_step: int, fence: Callable[[], None] = lambda: None) -> None:
        self._fence = fence
        fence()
        self._metrics = run_folder / "metrics.jsonl"
        self._line: dict[str, Any] = {}
        self._written_step = resume_step if resume_step > 0 else -1
        events = run_folder / "tensorboard"
        events.mkdir(parents=True, exist_ok=True)
        cut_metrics(self._metrics, self._written_step)
        earlier = set(events.glob("*tfevents*"))
        for path in sorted(earlier):
            cut_events(path, self._written_step)
        with reporting_full_disk(events):
            self._board = SummaryWriter(str(events))
        (self._event_file,) = set(events.glob("*tfevents*")) - earlier
        sync_folder(events)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record scalars of a step. Several calls for one step make one line, if nothing comes between them.

        Raises ValueError for a step whose line is already written, which a later step or `flush` does.
        """
        self._begin(step)
        with reporting_full_disk(self._event_file):
            for tag, value in values.items():
                self._board.add_scalar(tag, value, step, walltime=self._line["time"])
        self._line |= {tag: _jsonable(float(value)) for tag, value in values.items()}

    def histogram(self, step: int, tag: str, values: torch.Tensor) -> None:
        """Record the distribution of a tensor's finite values, of any shape and type; none if nothing is finite.

        Raises ValueError as `scalars` does.
        """
        self._begin(step)
        values = values.detach().float().cpu()
        values = values[values.isfinite()]
        if values.numel():
            with reporting_full_disk(self._event_file):
                self._board.add_histogram(tag, values, step, walltime=self._line["time"])

    def flush(self) -> None:
        """Bring everything recorded so far to the disk. Called before a checkpoint of this step starts to count.

        If the checkpoint counted first, a kill between the two would lose points that no attempt writes again.
        """
        self._fence()
        self._write_line()
        with reporting_full_disk(self._event_file):
            self._board.flush()
        sync_file(self._event_file)
        if self._metrics.exists():
            sync_file(self._metrics)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, FencedError):
            self.close()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._board.close()

    def _begin(self, step: int) -> None:
        if self._line and step == self._line["step"]:
            return
        if step <= max(self._written_step, self._line.get("step", -1)):
            raise ValueError(f"Figures of step {step} came after its line in {self._metrics} was written.")
        self._fence()
        self._write_line()
        self._line = {"step": step, "time": time.time()}

    def _write_line(self) -> None:
        if self._line:
            append_file(self._metrics, (json.dumps(self._line, allow_nan=False) + "\n").encode())
            self._written_step = self._line["step"]
            self._line = {}


def _jsonable(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
