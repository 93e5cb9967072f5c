"""The training state as tensors of a checkpoint, and back: any number of processes can go on from what others saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.checkpoint.reader import CheckpointReader
from mesatron.checkpoint.tensors import Fragment, TensorSpec
from mesatron.config import Config
from mesatron.model.parameter import initial_value
from mesatron.parallel.distributed import World
from mesatron.parallel.zero import KINDS, MOMENTS, ZeroEngine
from mesatron.train.saver import Hooks, Saver


def make_saver(config: Config, world: World, engine: ZeroEngine, attempt: str, hooks: Hooks) -> Saver:
    """What saves the run's checkpoints, see Saver."""
    folder, specs = config.run_folder / "checkpoints", specifications(engine, world)
    return Saver(folder, config.checkpoint, world, attempt, specs, lambda: fragments(engine), hooks)


def specifications(engine: ZeroEngine, world: World) -> dict[str, list[TensorSpec]]:
    """All tensors of a checkpoint by kind, the same in every process."""
    shapes = engine.shapes().items()
    return {
        "weights": [TensorSpec(name, tuple(shape)) for name, shape in shapes],
        "optimizer": [TensorSpec(f"{kind}/{name}", tuple(shape)) for kind in MOMENTS for name, shape in shapes],
        "rng": [
            TensorSpec(_generator_name(rank, name), tuple(state.shape), state.dtype)
            for name, state in _generators(world).items()
            for rank in range(world.size)
        ],
    }


def fragments(engine: ZeroEngine) -> Iterator[Fragment]:
    """The elements of weights and moments that this process saves, live."""
    for kind, name, start, values in engine.fragments():
        stretches = engine.shares[name].stretches(start, start + len(values))
        yield Fragment(*stored_as(kind, name), values, stretches)


def whole_weights(engine: ZeroEngine, world: World, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """The whole fp32 weights whose names begin so, on the host, in every process; all call it together."""
    own = [
        (fragment.name, list(fragment.stretches), fragment.values.cpu())
        for fragment in fragments(engine)
        if fragment.kind == "weights" and fragment.name.startswith(prefixes)
    ]
    shares = world.gather(own)
    shapes = engine.shapes()
    weights: dict[str, Tensor] = {}
    for name, stretches, values in [piece for share in world.from_first(lambda: shares) for piece in share]:
        if name not in weights:
            weights[name] = torch.zeros(shapes[name])
        flat = weights[name].view(-1)
        for there, here, count in stretches:
            flat[there : there + count] = values[here : here + count]
    return weights


def generator_states(world: World) -> list[Fragment]:
    """A copy of this process's random generators' states."""
    states = _generators(world).items()
    return [Fragment.whole("rng", _generator_name(world.rank, name), state) for name, state in states]


REPEATED = 2**16
"""Numbers that are drawn for a parameter's rehearsal, and repeated: 4e8 drawn ones take seconds."""


def fill_for_rehearsal(engine: ZeroEngine) -> None:
    """Put numbers into the weights that are spread like their start values, whatever the run goes on from.

    A first step on these has finite gradients, which those of a checkpoint from a diverged run may not give.
    """

    def elements(kind: str, name: str, start: int, stop: int) -> Tensor:
        value = initial_value(name, torch.Size([REPEATED]), engine.whole[name].info, seed=0)  # type: ignore[attr-defined]
        return value.repeat(-(-(stop - start) // REPEATED))[: stop - start]

    engine.restore(elements, KINDS[:1])


class StartState:
    """What training begins from: a checkpoint, or the start values that seed and parameter names give.

    own: `checkpoint` is this process's part of a local one (train/local.py).
    """

    def __init__(self, checkpoint: Path | None, engine: ZeroEngine, config: Config, own: bool = False) -> None:
        self._engine, self._config, self._own = engine, config, own
        self._reader = CheckpointReader(checkpoint) if checkpoint else None
        if self._reader and own:
            self._reader.check_model({name: (len(values),) for _, name, values in engine.kept(KINDS[:1])})
        elif self._reader:
            self._reader.check_model({name: tuple(shape) for name, shape in engine.shapes().items()})

    @property
    def state(self) -> dict[str, Any]:
        """What was saved with it; empty at a fresh start."""
        return self._reader.state if self._reader else {}

    def restore(self, world: World) -> None:
        """Put weights, moments, update count and this process's random generators in place."""
        reader = self._reader
        if reader and self._own:
            self._engine.restore_kept(lambda kind, name: reader.tensor(*stored_as(kind, name)))
        else:
            self._engine.restore(self._saved_elements if reader else self.start_elements)
        self._engine.optimizer_steps = self.state.get("optimizer_steps", 0)
        generators = reader.rng(world.rank) if reader else {}
        if "torch" in generators:
            torch.set_rng_state(generators["torch"])
        if "cuda" in generators and world.device.type == "cuda":
            torch.cuda.set_rng_state(generators["cuda"], world.device)

    def _saved_elements(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        assert self._reader
        values = torch.zeros(stop - start)
        self._reader.read(*stored_as(kind, name), self._engine.shares[name].stretches(start, stop), values)
        return values

    def start_elements(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """What the seed gives, see `ElementSource`."""
        if kind != "weight":
            return torch.zeros(stop - start)
        whole, seed = self._engine.whole[name], self._config.train.seed
        value = initial_value(name, whole.shape, whole.info, seed)  # type: ignore[attr-defined]
        own = self._engine.shares[name].cut(value).reshape(-1)[start:stop]
        return F.pad(own, (0, stop - start - len(own)))


def stored_as(kind: str, name: str) -> tuple[str, str]:
    """Kind and name in a checkpoint."""
    return ("weights", name) if kind == "weight" else ("optimizer", f"{kind}/{name}")


def _generator_name(rank: int, name: str) -> str:
    return f"rank-{rank:05d}/{name}"


def _generators(world: World) -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return states
