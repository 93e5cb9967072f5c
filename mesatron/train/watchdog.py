"""Ends a process that hangs, after writing down where it hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from mesatron.cluster.words import leave_word
from mesatron.errors import HungError, report

CHECKS_PER_LIMIT = 20
WRITING_SECONDS = 20.0
LINGER_FRACTION, MOST_LINGERING_SECONDS = 0.25, 30.0


class Watchdog:
    """A thread that ends this process with HungError's exit code once it has been silent for `limit_seconds`.

    Before that it writes the stacks of all threads and the last collectives to `path`, in every process that hangs: one
    that waits for a stopped process in a collective hangs too. Then it lingers for up to 30 s, as whoever leaves first
    ends the others. Time for which the whole process was stopped does not count. limit_seconds 0: it does nothing.
    """

    def __init__(self, limit_seconds: float, path: Path, end: Callable[[str, int], None]) -> None:
        self._limit_seconds, self._path, self._end = limit_seconds, path, end
        self._phase, self._patience, self._signs = "starting", limit_seconds, 0
        self._closed, self._given_up = threading.Event(), threading.Event()
        if limit_seconds:
            threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, phase: str, at_least_seconds: float = 0.0) -> None:
        """A phase begins, which may take `at_least_seconds` even if the limit is lower."""
        self._phase, self._patience = phase, max(self._limit_seconds, at_least_seconds)
        self._signs += 1

    def tick(self) -> None:
        """The phase goes on."""
        self._signs += 1

    def leave_end_to_it(self) -> None:
        """Never return once this process has been given up: a fault after that comes from peers who have left."""
        if self._given_up.is_set():
            threading.Event().wait()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    def _watch(self) -> None:
        interval = self._limit_seconds / CHECKS_PER_LIMIT
        silent, seen, before = 0.0, self._signs, time.monotonic()
        while not self._closed.wait(interval):
            now = time.monotonic()
            silent += min(now - before, 2 * interval)
            before = now
            if self._signs != seen:
                silent, seen = 0.0, self._signs
            if silent > self._patience:
                self._give_up()

    def _give_up(self) -> None:
        self._given_up.set()
        # The file system may be what hangs.
        timer = threading.Timer(WRITING_SECONDS, os._exit, (HungError.exit_code,))
        timer.daemon = True
        timer.start()
        leave_word(HungError.exit_code)
        error = HungError(
            f"Nothing has moved for {self._patience:g} s on {os.uname().nodename} while {self._phase}; see where each "
            f"process hangs in {self._path.parent}, and start the same job again."
        )
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("w") as file:
                file.write(f"{error}\n\n{_last_collectives()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        report(error)
        self._end(str(error), HungError.exit_code)
        timer.cancel()
        time.sleep(min(LINGER_FRACTION * self._limit_seconds, MOST_LINGERING_SECONDS))
        os._exit(HungError.exit_code)


def _last_collectives(count: int = 8) -> str:
    """What torch's flight recorder knows of the last collectives, the newest last."""
    lines = ["Last collectives:"]
    with suppress(Exception):  # a private interface of torch
        dump = torch._C._distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]
        recorded = json.loads(dump())["entries"][-count:]
        lines += [
            f"  {entry['profiling_name']} {entry['input_sizes']} in group {entry['process_group'][1]}, number "
            f"{entry['p2p_seq_id'] if entry['is_p2p'] else entry['collective_seq_id']}, "
            f"{'done' if entry['retired'] else 'not done'}"
            for entry in recorded
        ]
    return "\n".join(lines)
