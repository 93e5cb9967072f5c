"""Saving, pruning and cutting monitoring files, killed before every single change of the disk, in turn.

Checked against what each step's weights are known to be: whatever the moment, the newest checkpoint found is whole and
has them, nothing unfinished passes for a checkpoint, and the next attempt ends up as one that was never killed.
"""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from mesatron.checkpoint.reader import CheckpointReader
from mesatron.checkpoint.retention import prune, remove_leftovers
from mesatron.checkpoint.verify import find_latest, list_checkpoints, verify
from mesatron.config import load_config
from mesatron.monitor.records import cut_events, cut_metrics
from mesatron.monitor.writer import Monitor
from mesatron.train.run import Run
from mesatron.train.spikes import Rewind, Skipped
from mesatron.train.stop import StopFlag


def assert_sound(root: Path, weights, known_damage: int | None = None) -> int:
    """The newest checkpoint holds its step's weights, and all others that look complete verify. Its step."""
    latest, _ = find_latest(root)
    assert latest is not None
    reader = CheckpointReader(latest.path)
    assert reader.state == {"tokens": latest.step * 512}
    for name, value in weights(latest.step).items():
        assert torch.equal(reader.tensor("weights", name), value)
        assert torch.equal(reader.tensor("optimizer", f"exp_avg/{name}"), 2 * value)
    for info in list_checkpoints(root):
        if info.status == "complete" and info.step != known_damage:
            verify(info.path)
    return latest.step


@pytest.mark.parametrize("occupied", [False, True], ids=["free", "damaged-in-the-way"])
def test_a_save_killed_anywhere_loses_nothing(tmp_path, save, weights, killed, occupied):
    prepared = tmp_path / "prepared"
    save(prepared, 10, "1")
    save(prepared, 20, "1")
    if occupied:
        damaged = save(prepared, 30, "1") / "weights-00001.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")

    found = set()
    for point in itertools.count():
        root = tmp_path / f"cut-{point}"
        shutil.copytree(prepared, root, symlinks=True)

        def save_and_prune(root=root):
            save(root, 30, "2")
            prune(root, 30, keep_last=1, keep_every_steps=None, attempt="2")

        died = killed(point, save_and_prune)
        found.add(assert_sound(root, weights, known_damage=30 if occupied else None))
        if not died:
            break
        remove_leftovers(root, "3")
        save(root, 30, "3")
        prune(root, 30, keep_last=1, keep_every_steps=None, attempt="3")
        assert assert_sound(root, weights) == 30
        aside = {path.name for path in root.glob("damaged-step-00000030-*")}
        assert len(aside) == occupied
        assert {path.name for path in root.iterdir()} - aside == {"step-00000030", "latest"}
        assert os.readlink(root / "latest") == "step-00000030"
        shutil.rmtree(root)
    assert point > 50
    assert found == {20, 30}


def test_a_save_behind_training_killed_anywhere_loses_nothing(tmp_path, save, training, weights, killed):
    """Two saves by the saver itself, whose thread dies with its process at every point."""
    prepared = tmp_path / "prepared"
    save(prepared, 10, "1", world_size=1)

    def train(root: Path) -> None:
        run = training(root, "2")
        with run.saver:
            run.save(20)
            run.save(30)

    found = []
    for point in itertools.count():
        root = tmp_path / f"cut-{point}"
        shutil.copytree(prepared, root, symlinks=True)
        died = killed(point, lambda root=root: train(root))
        found.append(assert_sound(root, weights))
        if not died:
            break
        remove_leftovers(root, "3")
        run = training(root, "3")
        with run.saver:
            run.save(30)
        assert assert_sound(root, weights) == 30
        assert {path.name for path in root.iterdir()} == {"step-00000030", "latest"}
        shutil.rmtree(root)
    assert found == sorted(found)
    assert set(found) == {10, 20, 30}


def test_a_rewind_killed_anywhere_keeps_nothing_later_than_what_is_gone(tmp_path, save, killed, tiny_config):
    config = load_config(tiny_config(tmp_path))
    root = config.run_folder / "checkpoints"

    def go_back() -> None:
        Run(config, StopFlag(config)).go_back("1", Rewind(22, 45, 0, [20, 21], [1, 2]), "a spike", lambda: None)

    for point in itertools.count():
        for step in (10, 20, 30, 40):
            save(root, step, "1", world_size=1)
        died = killed(point, go_back)
        left = [info.step for info in list_checkpoints(root) if info.status == "complete"]
        assert left == [10, 20, 30, 40][: len(left)]
        assert {10, 20} <= set(left)
        if not died:
            break
        shutil.rmtree(config.run_folder)
    assert point > 10
    assert left == [10, 20]
    assert os.readlink(root / "latest") == "step-00000020"
    assert [rewind.to_step for rewind in Skipped.read(config.run_folder).rewinds] == [20]


def save_on(root: Path, save) -> None:
    latest, _ = find_latest(root)
    for step in itertools.count(latest.step + 1 if latest else 1):
        save(root, step, str(os.getpid()))
        prune(root, step, keep_last=2, keep_every_steps=None, attempt=str(os.getpid()))


def test_saves_killed_at_random_moments(tmp_path, save, weights):
    chance = random.Random(7)
    root = tmp_path / "checkpoints"
    began = time.monotonic()
    save(root, 0, "first")
    seconds = time.monotonic() - began
    steps = [0]
    unfinished = 0
    for _ in range(60):
        process = multiprocessing.get_context("fork").Process(target=save_on, args=(root, save))
        process.start()
        process.join(chance.uniform(0, 8 * seconds))
        process.kill()
        process.join()
        steps.append(assert_sound(root, weights))
        unfinished += any(info.status == "incomplete" for info in list_checkpoints(root))
        if chance.random() < 0.5:
            remove_leftovers(root, "none of the dead")
    assert steps == sorted(steps)
    assert steps[-1] >= 10
    assert unfinished >= 5


def test_cutting_monitoring_files_killed_anywhere(tmp_path, killed):
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    monitor = Monitor(prepared, 0)
    for step in range(1, 16):
        monitor.scalars(step, {"loss": 1 / step})
    monitor.close()

    def cut(run: Path) -> None:
        cut_metrics(run / "metrics.jsonl", 10)
        for path in (run / "tensorboard").glob("*tfevents*"):
            cut_events(path, 10)

    def steps(run: Path) -> tuple[list[int], list[int]]:
        files = (run / "tensorboard").glob("*tfevents*")
        events = [event for path in files for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines], [event.step for event in events]

    whole, short = list(range(1, 16)), list(range(1, 11))
    for point in itertools.count():
        run = tmp_path / f"cut-{point}"
        shutil.copytree(prepared, run)
        died = killed(point, lambda run=run: cut(run))
        assert all(found in (whole, short) for found in steps(run))
        cut(run)
        assert steps(run) == (short, short)
        assert {path.name for path in run.iterdir()} == {"metrics.jsonl", "tensorboard"}
        assert len(list((run / "tensorboard").iterdir())) == 1
        if not died:
            break
    assert point > 10
