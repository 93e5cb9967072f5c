"""Signs of life between the processes of a run: each counts a number up where all have met."""

from __future__ import annotations

import threading
from contextlib import suppress

from mesatron.parallel.distributed import World, node_key


class Pulse:
    """Counts this process's number up every `interval_seconds` and reads others', by a thread of its own.

    The first process reads all, the others read the first one's: a stop is noticed by a neighbour, in few reads. A
    process that is stopped, or on a node that is gone or cut off, counts no further.

    counts: the numbers as they were read last, by rank. They stand still too where the store is out of reach.
    """

    def __init__(self, world: World, interval_seconds: float) -> None:
        self.counts = dict.fromkeys(range(1, world.size) if world.is_first else [0], 0)
        self._nodes: dict[int, str] = {}
        self._interval_seconds = interval_seconds
        self._closed = threading.Event()
        threading.Thread(target=self._beat, args=(world,), daemon=True).start()

    def name(self, rank: int) -> str:
        """A process by its rank and, if it could be asked for, its node."""
        return f"process {rank}" + (f" on {self._nodes[rank]}" if rank in self._nodes else "")

    def close(self) -> None:
        """Give and read no more signs."""
        self._closed.set()

    def _beat(self, world: World) -> None:
        with suppress(RuntimeError):  # the store is gone, as it is when a run ends
            # A connection of its own: the main thread may wait for long in the other.
            store = world.store.clone()  # type: ignore[attr-defined]
            while not self._closed.wait(self._interval_seconds):
                store.add(f"pulse of process {world.rank}", 1)
                for rank in self.counts:
                    self.counts[rank] = store.add(f"pulse of process {rank}", 0)
                    if rank not in self._nodes:
                        self._nodes[rank] = store.get(node_key(rank)).decode()
