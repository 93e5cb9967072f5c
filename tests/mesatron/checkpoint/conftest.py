"""A small model's tensors, saved as a job of several ranks saves them, and a process that dies where it is told to."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mesatron.checkpoint.tensors import Fragment, TensorSpec
from mesatron.checkpoint.writer import CheckpointWriter
from mesatron.config.schema import CheckpointConfig
from mesatron.parallel.distributed import World
from mesatron.train.saver import Hooks, Saver

# Everything by which this package changes the disk.
WRITE_POINTS = (
    "open", "write", "pwrite", "ftruncate", "fsync", "rename", "replace", "symlink", "mkdir", "unlink", "rmdir",
)  # fmt: skip


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """Weights that differ from step to step, of awkward shapes."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"embedding": (7, 3), "blocks.0.bias": (5,), "blocks.0.scale": (), "head": (3, 11), "unused": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def tensors_of(step: int, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """All tensors of a step, by kind."""
    weights = weights_of(step)
    states = {}
    for rank in range(world_size):
        states[f"rank-{rank:05d}/torch"] = torch.arange(16, dtype=torch.uint8) + rank
    for rank in range(world_size):
        states[f"rank-{rank:05d}/python"] = torch.tensor([rank, -step])
    moments = {f"exp_avg/{name}": 2 * value for name, value in weights.items()}
    return {"weights": weights, "optimizer": moments, "rng": states}


def specs_of(tensors: dict[str, dict[str, torch.Tensor]]) -> dict[str, list[TensorSpec]]:
    return {kind: [TensorSpec.of(name, value) for name, value in named.items()] for kind, named in tensors.items()}


def fragments_of(tensors: dict[str, dict[str, torch.Tensor]], rank: int, world_size: int) -> Iterator[Fragment]:
    """Every world_size-th run of 8 elements of every tensor, the last of which may be shorter."""
    for kind, named in tensors.items():
        for name, value in named.items():
            elements = torch.arange(value.numel())
            own = elements[elements // 8 % world_size == rank]
            stretches, here = [], 0
            for begin in range(8 * rank, value.numel(), 8 * world_size):
                count = min(8, value.numel() - begin)
                stretches.append((begin, here, count))
                here += count
            yield Fragment(kind, name, value.reshape(-1)[own], stretches)


def save_step(root: Path, step: int, attempt: str, world_size: int = 2) -> Path:
    """Save a step: each rank's part in turn, then the commit. Every tensor is spread over all ranks."""
    tensors = tensors_of(step, world_size)
    specs = specs_of(tensors)
    writers = [CheckpointWriter(root, step, rank, world_size, attempt, specs) for rank in range(world_size)]
    written = [writer.write(fragments_of(tensors, writer.rank, world_size)) for writer in writers]
    checked = [writer.checksum() for writer in writers]
    return writers[0].commit({"tokens": step * 512}, {"config.yaml": "seed: 1\n"}, written, checked)


class Training:
    """One process's training state, which changes all the time, and the saver of its run, in `root`."""

    def __init__(self, root: Path, attempt: str, keep_last: int = 1) -> None:
        self.live = {name: torch.empty_like(value) for name, value in weights_of(0).items()}
        specs = specs_of(tensors_of(0, 1))
        settings, world = CheckpointConfig(keep_last=keep_last), World(0, 1, torch.device("cpu"))
        self.words: list[str] = []
        hooks = Hooks(lambda: None, self.words.append, lambda: None)
        self.saver = Saver(root, settings, world, attempt, specs, self.fragments, hooks)

    def fragments(self) -> Iterator[Fragment]:
        for name, value in self.live.items():
            yield Fragment.whole("weights", name, value)
        for name, value in self.live.items():
            yield Fragment.whole("optimizer", f"exp_avg/{name}", 2 * value)

    def save(self, step: int) -> None:
        """Begin to save the known weights of `step`, and train on."""
        for name, value in weights_of(step).items():
            self.live[name].copy_(value)
        states = tensors_of(step, 1)["rng"].items()
        self.saver.save(step, [Fragment.whole("rng", *state) for state in states], {"tokens": step * 512}, {})
        for value in self.live.values():
            value.fill_(torch.nan)


def die_at(point: int, action: Callable[[], Any]) -> bool:
    """Run `action` in a forked process that kills itself before its `point`-th change of the disk.

    A write dies with half of its bytes written. False if there were fewer changes and the action came through.
    """
    child = os.fork()
    if child == 0:
        remaining = point

        def deadly(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal remaining
                remaining -= 1
                if remaining < 0:
                    if name in ("write", "pwrite"):
                        real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in WRITE_POINTS:
            setattr(os, name, deadly(name, getattr(os, name)))
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the action itself failed"
    return False


@pytest.fixture
def save() -> Callable[..., Path]:
    return save_step


@pytest.fixture
def training() -> type[Training]:
    return Training


@pytest.fixture
def weights() -> Callable[[int], dict[str, torch.Tensor]]:
    return weights_of


@pytest.fixture
def killed() -> Callable[[int, Callable[[], Any]], bool]:
    return die_at
