"""What the processes tell each other about a save under way, while training runs its collectives in other threads.

It goes through the store at which the processes met, not through a process group: a thread can look there without
being in anybody's way, and can give up at any moment.
"""

import json
import pickle
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, Store

from mesatron.errors import MesatronError

_LOOK_AGAIN_SECONDS = 0.02
_FAILURE = "failure"


class Abandoned(Exception):
    """The save is not to go on: another process has failed, or this one is told to stop."""


class Agreement:
    """One process's view of the `number`-th save of `size` processes. interrupt: called while it waits."""

    def __init__(self, store: Store, rank: int, size: int, number: int, interrupt: Callable[[], None]) -> None:
        self._whole_store, self._store = store, PrefixStore(f"save/{number}", store)
        self._rank, self._size, self._number, self._interrupt = rank, size, number, interrupt

    def tell(self, phase: str, result: Any) -> None:
        """This process has ended `phase` with a result that JSON can hold."""
        self._store.set(f"{phase}/{self._rank}", json.dumps(result))
        self._store.add(phase, 1)

    def wait(self, phase: str, processes: int | None = None) -> None:
        """Return when so many processes, all by default, have ended `phase`. Raises Abandoned once one has failed."""
        while self._store.add(phase, 0) < (processes or self._size):
            self._interrupt()
            if self._store.check([_FAILURE]):
                raise Abandoned
            time.sleep(_LOOK_AGAIN_SECONDS)

    def told(self, phase: str) -> list[Any]:
        """The results of a phase that all have ended, by rank."""
        return [json.loads(self._store.get(f"{phase}/{rank}")) for rank in range(self._size)]

    def fail(self, error: MesatronError) -> None:
        """No process can go on with this save, because of `error`; the first failure stands."""
        self._store.compare_set(_FAILURE, "", pickle.dumps(error).hex())

    def failure(self) -> MesatronError | None:
        """Why the save failed, the same in all processes once they have ended it; None if it did not."""
        if not self._store.check([_FAILURE]):
            return None
        return pickle.loads(bytes.fromhex(self._store.get(_FAILURE).decode()))

    def forget_before(self, *phases: str) -> None:
        """Remove what was told of the save before. All processes must have ended that one."""
        before = PrefixStore(f"save/{self._number - 1}", self._whole_store)
        for phase in phases:
            for key in (phase, *(f"{phase}/{rank}" for rank in range(self._size))):
                before.delete_key(key)
