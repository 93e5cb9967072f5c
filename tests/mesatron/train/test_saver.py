"""One process's saver: memory over many saves, waiting, failing and giving up, with real files and real limits.

What several processes save together is in test_saving.py and test_faults.py, kills in checkpoint/test_kill_points.py.
"""

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from mesatron.checkpoint.tensors import Fragment, TensorSpec
from mesatron.checkpoint.verify import list_checkpoints, verify
from mesatron.config.schema import CheckpointConfig
from mesatron.errors import ConfigError, DiskFullError, NonFiniteError
from mesatron.parallel.distributed import World
from mesatron.train.saver import Hooks, Saver


class State:
    """A process that trains `size` elements, and its saver."""

    def __init__(self, root: Path, size: int = 1000, fence: Callable[[], None] = lambda: None, **settings: Any) -> None:
        self.root, self.values, self.words = root, torch.zeros(size), []
        self.world = World(0, 1, torch.device("cpu"))
        specs = {"weights": [TensorSpec("a", (size,))]}
        self.stretches: Callable[[], Iterator[tuple[int, int, int]]] = lambda: iter([(0, 0, size)])
        self.saver = Saver(
            root, CheckpointConfig(**settings), self.world, "1", specs,
            lambda: [Fragment("weights", "a", self.values, self.stretches())],
            Hooks(fence, self.words.append, lambda: None),
        )  # fmt: skip

    def save(self, step: int) -> None:
        self.values.fill_(step)
        self.saver.save(step, [], {}, {})
        self.values.fill_(-1)

    def saved(self, step: int) -> float:
        """The one value that all elements of a verified checkpoint have."""
        folder = self.root / f"step-{step:08d}"
        verify(folder)
        (value,) = load_file(folder / "weights-00000.safetensors")["a"].unique().tolist()
        return value


def test_fifty_saves_take_no_more_than_the_first_few(tmp_path: Path) -> None:
    """Of memory, files, threads and what the store remembers; a copy of the state has 32 MB."""
    state = State(tmp_path, size=8 << 20, keep_last=2)
    process = psutil.Process()

    def used() -> list[int]:
        return [state.world.store.num_keys(), threading.active_count(), process.num_fds()]

    with state.saver:
        for step in range(1, 6):
            state.save(step)
        state.saver.finish()
        memory, others = process.memory_info().rss, used()
        for step in range(6, 51):
            state.save(step)
        state.saver.finish()
        assert process.memory_info().rss - memory < 16 << 20
        assert used() == others
    assert [state.saved(step) for step in (49, 50)] == [49, 50]
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000049", "step-00000050", "latest"}
    assert len([line for line in state.words if ": saved " in line]) == 50


def test_a_save_in_the_way_of_the_next_is_waited_for_which_is_said(tmp_path: Path) -> None:
    may_commit = threading.Event()
    state = State(tmp_path, fence=may_commit.wait)
    with state.saver:
        state.save(1)
        state.saver.report()
        assert state.words == [], "it is not saved yet"
        threading.Timer(0.3, may_commit.set).start()
        state.save(2)
        assert state.saved(1) == 1
    assert state.saved(2) == 2
    begins = [f"step 1: saved {tmp_path / 'step-00000001'} in ", "step 2: waited ", "step 2: saved "]
    assert [line.startswith(begin) for line, begin in zip(state.words, begins, strict=True)] == [True] * 3


def test_a_synchronous_save_is_there_when_it_returns(tmp_path: Path) -> None:
    state = State(tmp_path, asynchronous=False)
    state.save(1)
    assert state.saved(1) == 1


def test_a_removal_that_fails_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint counts already when the old one's folder turns out not to be empty."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    state = State(tmp_path, keep_last=1)
    with state.saver:
        state.save(1)
        state.saver.finish()
        monkeypatch.setattr(os, "rmdir", refuse)
        state.save(2)
    assert state.saved(2) == 2
    assert state.words[-1] == f"step 2: {tmp_path / '.trash-step-00000001-1'} could not be removed yet"


def test_a_failed_write_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    """The kernel refuses to let files grow, as a full disk would; what there was before stays."""
    child = os.fork()
    if child == 0:
        state = State(tmp_path, size=100_000)
        try:
            with state.saver:
                state.save(1)
                state.saver.finish()
                resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
                state.save(2)
                while not state.saver.failed:
                    pass
                state.saver.finish()
        except DiskFullError as error:
            os._exit(error.exit_code if error.in_all_processes else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert State(tmp_path).saved(1) == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000001", "latest"}


def test_a_fence_that_refuses_ends_the_run_and_leaves_no_name(tmp_path: Path) -> None:
    def fence() -> None:
        raise ConfigError("A newer attempt owns the run.")

    state = State(tmp_path, fence=fence)
    state.save(1)
    with pytest.raises(ConfigError, match="A newer attempt") as caught:
        state.saver.finish()
    assert caught.value.in_all_processes
    assert list(tmp_path.iterdir()) == []


def test_what_ends_all_processes_together_lets_the_save_end_first(tmp_path: Path) -> None:
    state = State(tmp_path)

    def diverge() -> None:
        with state.saver:
            state.save(1)
            raise state.world.raised_by_all(NonFiniteError("diverged"))

    with pytest.raises(NonFiniteError):
        diverge()
    assert state.saved(1) == 1


def test_a_process_that_fails_alone_gives_up_at_once(tmp_path: Path) -> None:
    state, begun = State(tmp_path), threading.Event()

    def never_done() -> Iterator[tuple[int, int, int]]:
        while True:
            yield 0, 0, 1
            begun.set()

    def fail() -> None:
        with state.saver:
            state.save(1)
            begun.wait()
            raise ZeroDivisionError

    state.stretches = never_done
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert [info.status for info in list_checkpoints(tmp_path)] == ["incomplete"]
    assert threading.active_count() == threads
