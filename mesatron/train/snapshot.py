"""The training state on disk: all processes save together, and any number of them can go on from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mesatron.checkpoint.reader import CheckpointReader
from mesatron.checkpoint.retention import prune
from mesatron.checkpoint.tensors import TensorSpec
from mesatron.checkpoint.writer import CheckpointWriter
from mesatron.config import Config
from mesatron.model.parameter import initial_value
from mesatron.parallel.distributed import World
from mesatron.parallel.zero import KINDS, MOMENTS, ZeroEngine


def save(
    engine: ZeroEngine, config: Config, world: World, attempt: str, state: dict[str, Any], texts: dict[str, str]
) -> Path:
    """Write the checkpoint of `state["step"]` and remove those that retention no longer keeps.

    Tensor i is written by process i modulo their number; no process holds more than one whole tensor at a time.
    `state` and `texts` (config.yaml, environment.json) are the first process's.
    """
    root, step = config.run_folder / "checkpoints", state["step"]
    writer = CheckpointWriter(root, step, world.rank, world.size, attempt)
    shapes = engine.shapes()
    owned = engine.owned()

    def stream(kind: str, prefix: str) -> Iterator[tuple[str, Tensor]]:
        own = set(owned)
        for name, tensor in engine.gather(kind):
            if name in own:
                yield prefix + name, tensor.cpu()

    def moments() -> Iterator[tuple[str, Tensor]]:
        for kind in MOMENTS:
            yield from stream(kind, f"{kind}/")

    writer.write_tensors("weights", [TensorSpec(n, tuple(shapes[n])) for n in owned], stream("weight", ""))
    moment_specs = [TensorSpec(f"{kind}/{n}", tuple(shapes[n])) for kind in MOMENTS for n in owned]
    writer.write_tensors("optimizer", moment_specs, moments())
    writer.write_rng(_generators(world))
    writer.finish()
    world.barrier()

    def commit() -> Path:
        expected = {"weights": shapes.keys(), "optimizer": [f"{kind}/{n}" for kind in MOMENTS for n in shapes]}
        path = writer.commit({**state, "optimizer_steps": engine.optimizer_steps}, texts, expected)
        prune(root, step, config.checkpoint.keep_last, config.checkpoint.keep_every_steps or None, attempt)
        return path

    return world.from_first(commit)


class StartState:
    """What training begins from: a checkpoint, or the start values that seed and parameter names give."""

    def __init__(self, checkpoint: Path | None, engine: ZeroEngine, config: Config) -> None:
        self._engine, self._config = engine, config
        self._reader = CheckpointReader(checkpoint) if checkpoint else None
        if self._reader:
            self._reader.check_model({name: tuple(shape) for name, shape in engine.shapes().items()})

    @property
    def state(self) -> dict[str, Any]:
        """What `save` was given; empty at a fresh start."""
        return self._reader.state if self._reader else {}

    def initialize(self) -> None:
        """Put the seed's start values into the weights, whatever follows.

        A first step on these has finite gradients, which those of a checkpoint from a diverged run may not give.
        """
        self._engine.restore(self._start_value, KINDS[:1])

    def restore(self, world: World) -> None:
        """Put weights, moments, update count and this process's random generators in place."""
        self._engine.restore(self._tensor)
        self._engine.optimizer_steps = self.state.get("optimizer_steps", 0)
        generators = self._reader.rng(world.rank) if self._reader else {}
        if "torch" in generators:
            torch.set_rng_state(generators["torch"])
        if "cuda" in generators and world.device.type == "cuda":
            torch.cuda.set_rng_state(generators["cuda"], world.device)

    def _tensor(self, kind: str, name: str) -> Tensor:
        if not self._reader:
            return self._start_value(kind, name)
        return self._reader.tensor(*(("weights", name) if kind == "weight" else ("optimizer", f"{kind}/{name}")))

    def _start_value(self, kind: str, name: str) -> Tensor:
        whole = self._engine.whole[name]
        if kind == "weight":
            return initial_value(name, whole.shape, whole.info, self._config.train.seed)  # type: ignore[attr-defined]
        return torch.zeros(whole.shape)


def _generators(world: World) -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return states
