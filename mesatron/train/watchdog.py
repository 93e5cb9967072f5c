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
from mesatron.parallel.distributed import World
from mesatron.train.pulse import Pulse

CHECKS_PER_LIMIT = 20
WRITING_SECONDS = 20.0
OWN = -1
"""Where others have their rank, this process itself."""
MOST_NAMED = 8
LINGER_FRACTION, MOST_LINGERING_SECONDS = 0.25, 30.0


class Watchdog:
    """A thread that ends this process with HungError's exit code once nothing has moved for `limit_seconds`.

    That is when this process has shown no sign, for longer in a phase that may take longer, or when another one is
    stopped or gone (see Pulse), in whichever phase. Before the end it writes the stacks of all threads and the last
    collectives to `path`, in every process that hangs: one that waits for a stopped process in a collective hangs too.
    Then it lingers for up to 30 s, as whoever leaves first ends the others. Time for which the whole process was
    stopped does not count. limit_seconds 0: it does nothing.
    """

    def __init__(self, world: World, limit_seconds: float, path: Path, end: Callable[[str, int], None]) -> None:
        self.path = path
        self._limit_seconds, self._end = limit_seconds, end
        self._phase, self._patience, self._signs = "starting", limit_seconds, 0
        self._closed, self._given_up = threading.Event(), threading.Event()
        self._pulse: Pulse | None = None
        if limit_seconds:
            if world.size > 1:
                self._pulse = Pulse(world, limit_seconds / CHECKS_PER_LIMIT)
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
        if self._pulse:
            self._pulse.close()

    def _watch(self) -> None:
        interval = self._limit_seconds / CHECKS_PER_LIMIT
        seen: dict[int, int] = {}
        silent: dict[int, float] = {}
        before = time.monotonic()
        while not self._closed.wait(interval):
            now = time.monotonic()
            passed = min(now - before, 2 * interval)
            before = now
            signs = {OWN: self._signs} | (self._pulse.counts if self._pulse else {})
            silent = {who: silent[who] + passed if seen.get(who) == sign else 0.0 for who, sign in signs.items()}
            seen = signs
            others = {who: seconds for who, seconds in silent.items() if who != OWN}
            if silent[OWN] > self._patience or max(others.values(), default=0.0) > self._limit_seconds:
                # The one that a collective waits for is silent for a moment less or more than the one that waits.
                self._give_up([who for who, seconds in others.items() if seconds > self._limit_seconds / 2])

    def _give_up(self, silent_ranks: list[int]) -> None:
        self._given_up.set()
        # The file system may be what hangs.
        timer = threading.Timer(WRITING_SECONDS, os._exit, (HungError.exit_code,))
        timer.daemon = True
        timer.start()
        leave_word(HungError.exit_code)
        error = HungError(self._describe(silent_ranks))
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w") as file:
                file.write(f"{error}\n\n{_last_collectives()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        report(error)
        self._end(str(error), HungError.exit_code)
        timer.cancel()
        time.sleep(min(LINGER_FRACTION * self._limit_seconds, MOST_LINGERING_SECONDS))
        os._exit(HungError.exit_code)

    def _describe(self, silent_ranks: list[int]) -> str:
        what = f"Nothing has moved for {self._patience:g} s"
        if silent_ranks and self._pulse:
            names = [self._pulse.name(rank) for rank in silent_ranks[:MOST_NAMED]]
            more = len(silent_ranks) - len(names)
            what = f"No sign of life has come from {', '.join(names)}{f' and {more} more' if more else ''} for some "
            what += f"{self._limit_seconds:g} s"
        return (
            f"{what} on {os.uname().nodename} while {self._phase}; see where each process hangs in {self.path.parent}, "
            "and start the same job again."
        )


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
