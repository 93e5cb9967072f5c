"""Read batches ahead in threads, in order, with a time-out for each.

Threads, not processes: reading is file access and decompression, which leave the interpreter free, and a killed run
leaves no orphaned process and no shared memory behind.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from mesatron_data.errors import StorageError

T = TypeVar("T")
CLOSE_SECONDS = 5.0


class Prefetcher(Generic[T]):
    """Calls `read(position)` for position = first, first + 1, ... (below `end`, if given) and hands the results out
    in that order.

    With `workers` of 1 or more, that many threads keep `ahead` results each ready. With 0, one thread reads
    a position only when it is asked for: nothing is read in vain, and the time-out still holds.
    """

    def __init__(
        self,
        read: Callable[[int], T],
        first: int,
        workers: int,
        ahead: int,
        timeout_seconds: float,
        what: str,
        end: int | None = None,
    ) -> None:
        self._read = read
        self._ahead = ahead * workers
        self._timeout_seconds = timeout_seconds
        self._what = what
        self._next_read = self._next_out = first
        self._end = sys.maxsize if end is None else end
        self._limit = min(first + self._ahead, self._end)
        self._ready: dict[int, T] = {}
        self._failure: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(max(workers, 1))]
        for thread in self._threads:
            thread.start()

    def next(self) -> T:
        """Return the next result. Raises what `read` raised, or StorageError when the result takes longer than
        the time-out."""
        with self._changed:
            position = self._next_out
            self._limit = min(position + self._ahead + 1, self._end)
            self._changed.notify_all()
            self._changed.wait_for(lambda: position in self._ready or self._failure is not None, self._timeout_seconds)
            if position in self._ready:
                self._next_out += 1
                return self._ready.pop(position)
            if self._failure is not None:
                raise self._failure
            raise StorageError(
                f"{self._what} {position} did not arrive within {self._timeout_seconds:g} s: check that the "
                "data folder's storage answers, "
                f"or raise the time-out."
            )

    def ready(self) -> int:
        """How many results in a row wait to be handed out."""
        with self._changed:
            count = 0
            while self._next_out + count in self._ready:
                count += 1
            return count

    def close(self) -> None:
        """End the threads; one that is stuck in a read is left behind after CLOSE_SECONDS and ends with the process."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._failure is not None or self._next_read < self._limit
                )
                if self._closed or self._failure is not None:
                    return
                position = self._next_read
                self._next_read += 1
            try:
                result = self._read(position)
            except Exception as failure:  # handed to the thread that waits for the result
                with self._changed:
                    self._failure = self._failure or failure
                    self._changed.notify_all()
                return
            with self._changed:
                if not self._closed:
                    self._ready[position] = result
                self._changed.notify_all()
