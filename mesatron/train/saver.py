"""Saving behind training: a step waits for a copy in host memory only, a thread brings the copy to the disk.

Bounded in memory and in time: there is one copy, whose memory is taken once, so at most one save is under way and the
next one waits for it. What the processes have to agree on while they write goes through the store at which they met;
collectives are run in `finish` alone, by the thread that trains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from mesatron.checkpoint.agreement import Abandoned, Agreement
from mesatron.checkpoint.format import step_name
from mesatron.checkpoint.retention import prune
from mesatron.checkpoint.tensors import Fragment, TensorSpec
from mesatron.checkpoint.writer import CheckpointWriter
from mesatron.config.schema import CheckpointConfig
from mesatron.errors import MesatronError, PeerLostError
from mesatron.parallel.distributed import World

WRITTEN, CHECKED, COMMITTED = "written", "checked", "committed"


class HostCopy:
    """Host memory for all that a process saves of its fp32 state: taken once, page-locked beside a GPU."""

    def __init__(self, fragments: Iterable[Fragment], device: torch.device) -> None:
        self._device = device
        size = sum(len(fragment.values) for fragment in fragments)
        self._memory = torch.empty(size, pin_memory=device.type == "cuda")
        self._memory.zero_()  # the system gives memory at the first touch, which should not come within a save

    def take(self, fragments: Iterable[Fragment]) -> list[Fragment]:
        """The same fragments with the values of now, in this memory."""
        copies, start = [], 0
        for fragment in fragments:
            room = self._memory[start : start + len(fragment.values)]
            copies.append(fragment._replace(values=room.copy_(fragment.values, non_blocking=True)))
            start += len(room)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return copies


@dataclass(frozen=True)
class Snapshot:
    """What one process saves of a step. state, texts: as in CheckpointWriter.commit; the first process's count."""

    step: int
    fragments: list[Fragment]
    state: dict[str, Any]
    texts: dict[str, str]


@dataclass(frozen=True)
class Hooks:
    """What a saver calls.

    fence: in the first process, right before a checkpoint gets its name; what it raises ends the save. say: with the
    first process's words. alive: while training waits for a save that gets on.
    """

    fence: Callable[[], None]
    say: Callable[[str], None]
    alive: Callable[[], None]


class Saver:
    """All saves of one attempt, in one of its processes; as a context it ends the save under way when it is left.

    root: the run's checkpoint folder. specs: all tensors of a checkpoint, by kind. live: gives the fp32 fragments that
    this process saves, the same ones at every call.
    """

    def __init__(
        self, root: Path, settings: CheckpointConfig, world: World, attempt: str, specs: dict[str, list[TensorSpec]],
        live: Callable[[], Iterable[Fragment]], hooks: Hooks,
    ) -> None:  # fmt: skip
        self.root, self.settings, self.world, self.attempt, self.specs = root, settings, world, attempt, specs
        self.hooks, self._live = hooks, live
        self._host = HostCopy(live(), world.device)
        self._writing: Writing | None = None
        self.figures = {"time/checkpoint_seconds": 0.0, "time/checkpoint_stall_seconds": 0.0}
        """Of the last save that has been reported, in the first process; 0 before the first."""

    @property
    def busy(self) -> bool:
        """Whether a save is under way in this process."""
        return self._writing is not None and self._writing.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the last save has failed; then it soon has in all processes, and they must `finish`."""
        return self._writing is not None and not self.busy and self._writing.path is None

    def save(self, step: int, others: list[Fragment], state: dict[str, Any], texts: dict[str, str]) -> None:
        """Begin to save a step: what `live` gives now, and `others`, which nobody may change any more.

        All processes call it together. When the save before is still under way this waits for it and says so.
        Raises what made that one fail, as `finish` does.
        """
        called = time.perf_counter()
        self.finish(awaited_by=step)
        begin = time.perf_counter()
        snapshot = Snapshot(step, [*self._host.take(self._live()), *others], state, texts)
        self._writing = Writing(self, snapshot, called, begin)
        if not self.settings.asynchronous:
            self.finish()

    def report(self) -> None:
        """Say of the save under way, once, that it has come to its end, if it has."""
        writing = self._writing
        if writing is not None and writing.path is not None and not writing.reported and self.world.is_first:
            writing.reported = True
            stall_seconds = writing.stall_seconds if self.settings.asynchronous else writing.seconds
            self.figures = {"time/checkpoint_seconds": writing.seconds, "time/checkpoint_stall_seconds": stall_seconds}
            self.hooks.say(
                f"step {writing.step}: saved {writing.path} in {writing.seconds:.1f} s, of which training stood still "
                f"for {stall_seconds:.2f} s"
            )
            for path in writing.left:
                self.hooks.say(f"step {writing.step}: {path} could not be removed yet")

    def finish(self, awaited_by: int | None = None) -> None:
        """Wait for the save under way, if there is one. All processes call it together.

        awaited_by: a step for whose sake training waits, which is said. Raises in every process what made the save
        fail in one of them.
        """
        if self._writing is None:
            return
        begin, waited, progress = time.perf_counter(), False, -1
        # Meeting again and again, where one could wait alone, shows whether the others are alive, and that one has
        # failed which has lost its way to the store.
        while (sums := self.world.sum(float(self.busy), float(self.failed)))[0]:
            waited = True
            if sums[1]:
                self._writing.abandon()
            self._writing.join(0.05)
            if not self.busy or progress != self._writing.progress:
                progress = self._writing.progress
                self.hooks.alive()
        self.report()
        writing, self._writing = self._writing, None
        if waited and awaited_by is not None and self.world.is_first:
            seconds = time.perf_counter() - begin
            self.hooks.say(f"step {awaited_by}: waited {seconds:.1f} s for the checkpoint of step {writing.step}")
        writing.raise_failure()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif getattr(error, "in_all_processes", False):
            with suppress(MesatronError):  # one fault is told, the first
                self.finish()
        elif self._writing is not None:  # the others may be gone
            self._writing.abandon()
            self._writing.join()


class Writing(threading.Thread):
    """A save under way, from construction on. path: its checkpoint, once that counts. progress: counts what gets on."""

    def __init__(self, saver: Saver, snapshot: Snapshot, called: float, begin: float) -> None:
        super().__init__(daemon=True)
        world = saver.world
        self.step, self.seconds, self.progress = snapshot.step, 0.0, 0
        self.path: Path | None = None
        self.left: list[Path] = []  # of older checkpoints, what could not be removed yet
        self.reported = False
        self._saver, self._snapshot, self._begin = saver, snapshot, begin
        self._agreement = Agreement(world.store, world.rank, world.size, next(world.numbers), self._go_on)
        self._writer = CheckpointWriter(
            saver.root, self.step, world.rank, world.size, saver.attempt, saver.specs, self._go_on
        )
        self._error: BaseException | None = None
        self._abandoned = False
        self.stall_seconds = time.perf_counter() - called  # with the wait for the save before
        self.start()

    def run(self) -> None:
        agreement, writer = self._agreement, self._writer
        try:
            agreement.tell(WRITTEN, writer.write(self._snapshot.fragments))
            agreement.wait(WRITTEN)
            agreement.tell(CHECKED, writer.checksum())
            if self._saver.world.is_first:
                agreement.wait(CHECKED)
                agreement.forget_before(WRITTEN, CHECKED, COMMITTED)
                self._commit()
                agreement.tell(COMMITTED, None)
            agreement.wait(COMMITTED, 1)
            self.seconds = time.perf_counter() - self._begin
            self.path = self._saver.root / step_name(self.step)
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error
            with suppress(dist.DistError):  # the store may have gone with its process
                agreement.fail(error if isinstance(error, MesatronError) else PeerLostError("A save has failed."))

    def raise_failure(self) -> None:
        """Once it has ended in all processes: raise in each of them what made it fail, if it did."""
        if self._error is not None and not isinstance(self._error, MesatronError):
            raise self._error
        failure = self._agreement.failure()
        if failure is None and self.path is None:
            failure = PeerLostError("A save has failed.")
        if failure is None:
            return
        world = self._saver.world
        if world.is_first:
            self._writer.discard()
        raise failure if isinstance(failure, PeerLostError) else world.raised_by_all(failure)

    def abandon(self) -> None:
        """Make it give up, soon; what has been written stays behind, as after a kill."""
        self._abandoned = True

    def _go_on(self) -> None:
        self.progress += 1
        if self._abandoned:
            raise Abandoned

    def _commit(self) -> None:
        saver, settings, snapshot = self._saver, self._saver.settings, self._snapshot
        written, checked = self._agreement.told(WRITTEN), self._agreement.told(CHECKED)
        self._writer.commit(snapshot.state, snapshot.texts, written, checked, saver.hooks.fence)
        self.left = prune(saver.root, self.step, settings.keep_last, settings.keep_every_steps or None, saver.attempt)
