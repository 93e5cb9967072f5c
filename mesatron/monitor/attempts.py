"""attempts.jsonl: one line when an attempt at the run starts, one when it ends, and one for each decision it takes."""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesatron.errors import FencedError
from mesatron.files import append_file, replace_file, sync_file, sync_folder


class Attempt:
    """One start of a run, logged in `path` from its construction on. One process of the run has one.

    resumed_from: the step of the checkpoint it continues, or None for a fresh start.
    number: counts the attempts from 1. killed: numbers of earlier attempts that ended without saying so; their ends
    are logged now, with the reason "killed". Raises DiskFullError.

    The newest attempt owns the run. An older one may still be alive on a node that the network has lost, where no lock
    reaches it: before it commits anything it calls `check_newest`.

    Lines: {"event": "start", "attempt": 2, "time": <Unix seconds>, "host": ..., "pid": ..., "resumed_from": 100},
    {"event": "decision", "attempt": 2, "time": ..., "step": 120, "what": "..."}
    {"event": "ready", "attempt": 2, "time": ..., "step": 100} when the first step begins,
    and {"event": "end", "attempt": 2, "time": ..., "reason": "finished", "exit_code": 0, "seconds": {...}}, with the
    time spent as mesatron.monitor.goodput has it. If the attempt was killed, time and exit_code are null, and last_seen
    and last_step are those of `last_sign`, the last figures it has written (the time of its start if there are none).
    """

    def __init__(self, path: Path, resumed_from: int | None, last_sign: Mapping[str, Any] | None = None) -> None:
        self._path = path
        records = read_attempts(path)
        started = {record["attempt"]: record["time"] for record in records if record["event"] == "start"}
        ended = {record["attempt"] for record in records if record["event"] == "end"}
        _remove_torn_end(path)
        self.killed = [attempt for attempt in started if attempt not in ended]
        self.number = max(started, default=0) + 1
        for attempt in self.killed:
            sign = last_sign if last_sign and last_sign["time"] > started[attempt] else {}
            self._append(
                {
                    "event": "end",
                    "attempt": attempt,
                    "time": None,
                    "reason": "killed",
                    "exit_code": None,
                    "last_seen": sign.get("time", started[attempt]),
                    "last_step": sign.get("step"),
                }
            )
        self._append(
            {
                "event": "start",
                "attempt": self.number,
                "time": time.time(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "resumed_from": resumed_from,
            }
        )
        sync_folder(path.parent)
        self._examined_bytes = path.stat().st_size

    def check_newest(self) -> None:
        """Raise FencedError once a newer attempt has started."""
        start = self._examined_bytes  # the thread that saves looks too, perhaps at this moment
        with self._path.open("rb") as file:  # opened anew each time: only so does a network file system look again
            file.seek(start)
            news = file.read()
        whole = news[: news.rfind(b"\n") + 1]
        for record in _parse(whole):
            if record["event"] == "start" and record["attempt"] > self.number:
                raise FencedError(
                    f"Attempt {record['attempt']} on {record['host']} has taken over {self._path.parent}, so attempt "
                    f"{self.number} ends without writing anything more."
                )
        self._examined_bytes = start + len(whole)

    def ready(self, step: int) -> None:
        """Log that the step after `step` begins."""
        self._append({"event": "ready", "attempt": self.number, "time": time.time(), "step": step})

    def decide(self, step: int, what: str) -> None:
        """Log a decision that the run took by itself after `step`."""
        self._append({"event": "decision", "attempt": self.number, "time": time.time(), "step": step, "what": what})

    def end(self, reason: str, exit_code: int, seconds: Mapping[str, float] | None = None) -> None:
        """Log why this attempt ends, in a few words, and the exit code it ends with; nothing once it is not the newest,
        which has logged its end already."""
        with suppress(FencedError):
            self.check_newest()
            self._append(
                {
                    "event": "end",
                    "attempt": self.number,
                    "time": time.time(),
                    "reason": reason,
                    "exit_code": exit_code,
                    "seconds": seconds or {},
                }
            )

    def _append(self, record: dict[str, Any]) -> None:
        append_record(self._path, record)


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line to attempts.jsonl, apart from one that a kill has torn, and bring it to the disk."""
    torn = _whole_lines(path)[1]
    append_file(path, (b"\n" if torn else b"") + json.dumps(record).encode() + b"\n")
    sync_file(path)


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """The lines of attempts.jsonl that are whole; none if there is no such file."""
    return _parse(_whole_lines(path)[0])


def _parse(lines: bytes) -> list[dict[str, Any]]:
    records = []
    for line in lines.splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def _remove_torn_end(path: Path) -> None:
    """A last line that a kill has torn would be glued to the next one."""
    whole, torn = _whole_lines(path)
    if torn:
        replace_file(path, [whole])


def _whole_lines(path: Path) -> tuple[bytes, bytes]:
    content = path.read_bytes() if path.exists() else b""
    end = content.rfind(b"\n") + 1
    return content[:end], content[end:]
