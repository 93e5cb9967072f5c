"""What attempts.jsonl says of a run, and the lines that a job adds to it around the training."""

from __future__ import annotations

import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from mesatron.checkpoint.format import STEP_FOLDER
from mesatron.errors import say
from mesatron.monitor.attempts import append_record, read_attempts
from mesatron.monitor.metrics import read_metrics


class History:
    """The attempts of the run in `folder`, read anew at every call, for another process may be writing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "attempts.jsonl"

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        """All lines, or those of one event."""
        return [record for record in read_attempts(self._path) if event in (None, record["event"])]

    @property
    def newest_attempt(self) -> int:
        """Number of the attempt that was started last; 0 before the first."""
        return max((record["attempt"] for record in self.records("start")), default=0)

    @property
    def is_running(self) -> bool:
        """Whether the newest attempt has not logged its end; a killed one logs it only when the next one starts."""
        ended = {record["attempt"] for record in self.records("end")}
        return self.newest_attempt not in ended | {0}

    def end_code(self, first_attempt: int) -> int | None:
        """Exit code of the last attempt from `first_attempt` on; None if none ended with a word of its own."""
        ends = [record["exit_code"] for record in self.records("end") if record["attempt"] >= first_attempt]
        return ends[-1] if ends else None

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint by its name; 0 before the first."""
        folders = (self.folder / "checkpoints").glob("step-*")
        return max((int(path.name[5:]) for path in folders if STEP_FOLDER.fullmatch(path.name)), default=0)

    def first_step(self, attempt: int) -> int:
        """The step that an attempt went on from, or will as things are if it has not started; 0 from scratch."""
        starts = (record for record in self.records("start") if record["attempt"] == attempt)
        start = next(starts, None)
        return self.saved_step if start is None else start["resumed_from"] or 0

    def decide(self, what: str, **details: str | int) -> None:
        """Add the line of an automatic decision, and say it on standard error, for a script may read the output."""
        say(f"{what}.")
        record = {
            "event": "decision", "attempt": self.newest_attempt or None, "time": time.time(), "step": self.saved_step,
            "what": what,
        }  # fmt: skip
        append_record(self._path, record | details)

    def requeues_without_progress(self) -> int:
        """Requeues decided since there was another newest checkpoint."""
        decisions = self.records("decision")
        requeues = [record["step"] for record in decisions if record["what"].startswith("requeue")]
        saved = self.saved_step
        return len(list(takewhile(lambda step: step == saved, reversed(requeues))))

    def failed_nodes(self) -> dict[str, int]:
        """How often each node was found to have failed."""
        counts: dict[str, int] = {}
        for record in self.records("decision"):
            if "failed_node" in record:
                counts[record["failed_node"]] = counts.get(record["failed_node"], 0) + record["failures"]
        return counts

    def slowest_step_and_saves_seconds(self, tokens_per_step: int) -> float | None:
        """Seconds of the slowest of the last hundred steps logged and of two of the slowest saves.

        A last save waits for the one that is under way. None before the first checkpoint.
        """
        figures = read_metrics(self.folder / "metrics.jsonl")
        speeds = [line["train/tokens_per_second"] for line in figures if line.get("train/tokens_per_second")][-100:]
        saves = [line["time/checkpoint_seconds"] for line in figures if line.get("time/checkpoint_seconds")]
        return tokens_per_step / min(speeds) + 2 * max(saves) if speeds and saves else None
