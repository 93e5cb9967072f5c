"""A small model's tensors, saved as a job of several ranks saves them, and a process that dies where it is told to."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mesatron.checkpoint.tensors import TensorSpec
from mesatron.checkpoint.writer import CheckpointWriter

# Everything by which this package changes the disk.
WRITE_POINTS = ("open", "write", "fsync", "rename", "replace", "symlink", "mkdir", "unlink", "rmdir")


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """Weights that differ from step to step, of awkward shapes."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"embedding": (7, 3), "blocks.0.bias": (5,), "blocks.0.scale": (), "head": (3, 11), "unused": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save_step(root: Path, step: int, attempt: str, world_size: int = 2) -> Path:
    """Save a step: each rank's part in turn, then the commit. Tensors go to the ranks in turn."""
    weights = weights_of(step)
    moments = {f"exp_avg/{name}": 2 * value for name, value in weights.items()}
    writers = [CheckpointWriter(root, step, rank, world_size, attempt) for rank in range(world_size)]
    for rank, writer in enumerate(writers):
        for kind, tensors in {"weights": weights, "optimizer": moments}.items():
            own = list(tensors.items())[rank::world_size]
            writer.write_tensors(kind, [TensorSpec.of(name, value) for name, value in own], iter(own))
        writer.write_rng({"torch": torch.arange(16, dtype=torch.uint8) + rank, "python": torch.tensor([rank, -step])})
        writer.finish()
    return writers[0].commit({"tokens": step * 512}, {"config.yaml": "seed: 1\n"}, {"weights": weights.keys()})


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
                    if name == "write":
                        real(args[0], bytes(args[1])[: len(args[1]) // 2])
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
def weights() -> Callable[[int], dict[str, torch.Tensor]]:
    return weights_of


@pytest.fixture
def killed() -> Callable[[int, Callable[[], Any]], bool]:
    return die_at
