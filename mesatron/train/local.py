"""Checkpoints on the nodes' own disks or in their memory: frequent, and as good as gone with a node.

Every process keeps what it holds in checkpoints of its own, in the usual format: one rank, flat pieces as tensors. So a
saver for a world of one process writes them, with nobody to agree with. What all processes have of the same step and
attempt is a state of the run, which can go on from it in the same layout.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mesatron.checkpoint.reader import CheckpointReader
from mesatron.checkpoint.retention import remove, remove_leftovers
from mesatron.checkpoint.tensors import Fragment, TensorSpec
from mesatron.checkpoint.verify import CheckpointInfo, find_damage, list_checkpoints
from mesatron.config import Config, changed_keys, load_stored_config
from mesatron.errors import MesatronError, report, unusable_path
from mesatron.files import replace_file
from mesatron.monitor.attempts import read_attempts
from mesatron.parallel.distributed import World
from mesatron.parallel.zero import ZeroEngine
from mesatron.train.saver import Hooks, Saver
from mesatron.train.snapshot import generator_states, stored_as
from mesatron.train.spikes import Skipped

KEPT = 2
"""A process may have ended its part of a step while another is killed over its own: then the step before counts."""


class LocalSaver(Saver):
    """A saver of this process's part alone: when it fails, that is said, local checkpoints end, and the run goes on."""

    given_up = False

    def save(self, step: int, others: list[Fragment], state: dict[str, Any], texts: dict[str, str]) -> None:
        self.finish(awaited_by=step)
        if not self.given_up:
            super().save(step, others, state, texts)

    def finish(self, awaited_by: int | None = None) -> None:
        try:
            super().finish(awaited_by)
        except (MesatronError, OSError) as error:
            if isinstance(error, OSError):
                report(unusable_path(error))
            self.given_up = True


def find_local(config: Config, world: World) -> tuple[CheckpointInfo | None, list[str]]:
    """The newest step that every process has whole, this process's part of it, and why newer ones were passed over.

    All processes call it together. Every process verifies its own part. The notes are the first process's.
    """
    root = _root(config, world, make=False) if config.checkpoint.local_folder else None
    if root is None:
        return None, []
    own = {}
    for info in list_checkpoints(root):
        with suppress(MesatronError, OSError, ValueError, KeyError):  # damaged, or of another version
            if info.status == "complete" and _fits(info.path, config, world):
                own[info.step, CheckpointReader(info.path).state["attempt"]] = info
    shares = world.gather(set(own))
    common: list[tuple[int, str]] = world.from_first(
        lambda: sorted(
            (one for one in set.intersection(*shares) if not is_given_up(config.run_folder, *one)), reverse=True
        )
    )
    notes = [
        f"Passing over what some processes have of the local checkpoint of step {step}: others have nothing of it."
        for step, _ in sorted(set().union(*shares) - set(common), reverse=True)
    ]
    for step_and_attempt in common:
        info = own[step_and_attempt]
        damage = find_damage(info.path)
        found = world.gather(f"Passing over {info.path}: {damage}." if damage else None)
        notes += [note for note in found if note]
        if not world.sum(float(damage is not None))[0]:
            return info, notes
    return None, notes


def make_local_saver(
    config: Config, world: World, engine: ZeroEngine, attempt: str, hooks: Hooks, start_step: int
) -> LocalSaver:
    """What saves this process's part, now that the run goes on from `start_step`; all processes call it together.

    Later steps belong to a future that has been given up, and are removed.
    """
    root = _root(config, world, make=True)
    assert root
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root, attempt)
    drop_local(config, world, start_step + 1, attempt)

    def kept() -> Iterator[Fragment]:
        for kind, name, values in engine.kept():
            yield Fragment.whole(*stored_as(kind, name), values)

    specs: dict[str, list[TensorSpec]] = {"weights": [], "optimizer": [], "rng": []}
    for fragment in [*kept(), *generator_states(world)]:
        specs[fragment.kind].append(TensorSpec.of(fragment.name, fragment.values))
    settings = config.checkpoint.model_copy(update={"keep_last": KEPT, "keep_every_steps": 0})
    return LocalSaver(root, settings, World(0, 1, world.device), attempt, specs, kept, hooks)


def drop_local(config: Config, world: World, first_step: int, attempt: str) -> None:
    """Remove this process's parts from `first_step` on; all processes call it together."""
    root = _root(config, world, make=False)
    for info in list_checkpoints(root) if root else []:
        if info.step >= first_step:
            remove(info.path, attempt)


def _root(config: Config, world: World, make: bool) -> Path | None:
    """The folder of this process; None when the run has never had local checkpoints, unless `make`."""
    folder, path = config.checkpoint.local_folder, config.run_folder / ".local-identifier"
    assert folder

    def identifier() -> str | None:
        # A run that was deleted and begun again under its name must not find what the first one has left on nodes.
        if make and not path.exists():
            replace_file(path, [secrets.token_hex(8).encode()])
        return path.read_text() if path.exists() else None

    found = world.from_first(identifier)
    return folder / f"{config.name}-{found}" / f"rank-{world.rank:05d}" if found else None


def is_given_up(run_folder: Path, step: int, attempt: str) -> bool:
    """Whether an attempt after the one that saved `step` has gone on from an earlier one, perhaps on other nodes.

    The figures after that are gone, and a spike that was undone would come back.
    """
    starts = [record for record in read_attempts(run_folder / "attempts.jsonl") if record["event"] == "start"]
    origins = [(start["attempt"], start["resumed_from"] or 0) for start in starts]
    origins += [(_number(rewind.attempt), rewind.to_step) for rewind in Skipped.read(run_folder).rewinds]
    return any(number > _number(attempt) and origin < step for number, origin in origins)


def _number(attempt: str) -> int:
    """Of attempt-0012, 12; 0 where it was not noted."""
    return int(attempt.rpartition("-")[2] or 0)


def _fits(path: Path, config: Config, world: World) -> bool:
    """Whether the part was saved in the layout of now."""
    reader = CheckpointReader(path)
    changes = changed_keys(load_stored_config(path / "config.yaml"), config)
    return reader.state["world_size"] == world.size and not any(key.startswith("parallel.") for key in changes)
