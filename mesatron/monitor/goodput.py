"""Where a run's wall-clock time went, over all its attempts. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

KINDS = ("training", "data", "validation", "checkpoint")


class Ledger:
    """Seconds of each of KINDS: in every moment after `begin` one of them runs. seconds: what earlier attempts spent
    up to the checkpoint that this one continues."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0) | dict(seconds)
        self._kind: str | None = None
        self._since = 0.0

    def begin(self) -> None:
        """Training begins."""
        self._kind, self._since = "training", time.monotonic()

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Count the time inside this context under `kind`."""
        outside = self._kind
        self._switch(kind)
        yield
        self._switch(outside)

    def read(self) -> dict[str, float]:
        """Seconds so far."""
        self._switch(self._kind)
        return dict(self._seconds)

    def _switch(self, kind: str | None) -> None:
        now = time.monotonic()
        if self._kind is not None:
            self._seconds[self._kind] += now - self._since
        self._kind, self._since = kind, now


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run's life.

    training, data, validation, checkpoint: steps that count, waiting for their data, validations and the stall of
    saving. starting: from the start of each attempt to its first step. between: from the end of each attempt to the
    start of the next. lost: what was trained and lost with the attempt, or undone.
    """

    attempts: int
    training: float
    data: float
    validation: float
    checkpoint: float
    starting: float
    between: float
    lost: float

    @property
    def total(self) -> float:
        """From the first start to the last end."""
        return sum((getattr(self, kind) for kind in KINDS), self.starting + self.between + self.lost)

    def describe(self) -> str:
        """`1:02:03 in 4 attempts: training 84.1 %, data 0.3 %, ...`."""
        shares = [
            f"{name} {getattr(self, name) / max(self.total, 1e-9):.1%}"
            for name in (*KINDS, "starting", "between", "lost")
        ]
        attempts = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return f"{timedelta(seconds=round(self.total))} in {attempts}: {', '.join(shares)}"


def account(records: Sequence[Mapping[str, Any]], kept: Mapping[str, float], now: float) -> Goodput:
    """The account of a run from the lines of attempts.jsonl.

    kept: seconds of each of KINDS that led to where the run is. now: Unix time until which its last attempt lived, if
    that has no end.
    """
    found: dict[str, dict[int, Mapping[str, Any]]] = {"start": {}, "ready": {}, "end": {}}
    for record in records:
        found.get(record["event"], {})[record["attempt"]] = record
    starts, readies, ends = found["start"], found["ready"], found["end"]
    # One that found the run complete did nothing to it.
    attempts = [n for n in sorted(starts) if n in readies or n not in ends or ends[n]["exit_code"] != 0]
    starting = between = 0.0
    first: float = starts[attempts[0]]["time"] if attempts else now
    end = first
    for attempt in attempts:
        begin = max(starts[attempt]["time"], end)  # a clock may be set back, or be another node's
        between += begin - end
        own_end = ends.get(attempt, {"time": now})
        end = max(own_end["time"] or own_end["last_seen"], begin)
        starting += min(max(readies.get(attempt, {"time": end})["time"], begin), end) - begin
    spent = {kind: kept.get(kind, 0.0) for kind in KINDS}
    lost = max(0.0, end - first - starting - between - sum(spent.values()))
    return Goodput(len(attempts), starting=starting, between=between, lost=lost, **spent)
