"""attempts.jsonl: one line when an attempt at the run starts, one when it ends, and one for each decision it takes."""

import json
import os
import socket
import time
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
    and {"event": "end", "attempt": 2, "time": ..., "reason": "finished", "exit_code": 0}, where time and exit_code are
    null if killed.
    """

    def __init__(self, path: Path, resumed_from: int | None) -> None:
        self._path = path
        records = _read(path)
        started = [record["attempt"] for record in records if record["event"] == "start"]
        ended = {record["attempt"] for record in records if record["event"] == "end"}
        self.killed = [attempt for attempt in started if attempt not in ended]
        self.number = max(started, default=0) + 1
        for attempt in self.killed:
            self._append({"event": "end", "attempt": attempt, "time": None, "reason": "killed", "exit_code": None})
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
        with self._path.open("rb") as file:  # opened anew each time: only so does a network file system look again
            file.seek(self._examined_bytes)
            news = file.read()
        whole = news[: news.rfind(b"\n") + 1]
        for line in whole.splitlines():
            record = json.loads(line)
            if record["event"] == "start" and record["attempt"] > self.number:
                raise FencedError(
                    f"Attempt {record['attempt']} on {record['host']} has taken over {self._path.parent}, so attempt "
                    f"{self.number} ends without writing anything more."
                )
        self._examined_bytes += len(whole)

    def decide(self, step: int, what: str) -> None:
        """Log a decision that the run took by itself after `step`."""
        self._append({"event": "decision", "attempt": self.number, "time": time.time(), "step": step, "what": what})

    def end(self, reason: str, exit_code: int) -> None:
        """Log why this attempt ends, in a few words, and the exit code it ends with; nothing once it is not the newest,
        which has logged its end already."""
        with suppress(FencedError):
            self.check_newest()
            self._log_end(reason, exit_code)

    def _log_end(self, reason: str, exit_code: int) -> None:
        self._append(
            {
                "event": "end",
                "attempt": self.number,
                "time": time.time(),
                "reason": reason,
                "exit_code": exit_code,
            }
        )

    def _append(self, record: dict[str, Any]) -> None:
        append_file(self._path, (json.dumps(record) + "\n").encode())
        sync_file(self._path)


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines that are records; a last one torn by a kill is removed, or the next would be glued to it."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        replace_file(path, [whole])
    records = []
    for line in whole.splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records
