"""TensorBoard files and metrics.jsonl, read back raw, against the figures of a run that was never interrupted.

Every event file is read with TensorBoard's own loader, without the logic by which its pages hide doubled points.
"""

import json
import math
import multiprocessing
import os
import random
import resource
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from mesatron.errors import DiskFullError, FencedError
from mesatron.monitor.writer import Monitor

TAGS = ("train/loss", "train/grad_norm", "validation/loss", "gamma")


def points(run: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of every point in every event file; a histogram's value is the number of what it counts."""
    found = []
    for path in sorted((run / "tensorboard").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                array = make_ndarray(value.tensor)
                # A histogram is a table of left edge, right edge, count.
                found.append((value.tag, event.step, float(array[:, 2].sum() if array.ndim else array)))
    return found


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def loss(step: int) -> float:
    return 8 / (step + 1)


def record(monitor: Monitor, step: int) -> None:
    """A step's figures: training, on some steps a histogram of step + 1 elements, on some validation."""
    monitor.scalars(step, {"train/loss": loss(step), "train/grad_norm": float(step)})
    if step % 5 == 0:
        monitor.histogram(step, "gamma", torch.linspace(0, 1, step + 1))
        monitor.scalars(step, {"validation/loss": 2 * loss(step)})


def assert_one_point_per_step(run: Path, first: int, last: int) -> None:
    expected = []
    for step in range(first, last + 1):
        expected += [("train/loss", step, loss(step)), ("train/grad_norm", step, float(step))]
        if step % 5 == 0:
            expected += [("gamma", step, float(step + 1)), ("validation/loss", step, 2 * loss(step))]
    found = points(run)
    assert sorted((tag, step) for tag, step, _ in found) == sorted((tag, step) for tag, step, _ in expected)
    assert [value for *_, value in sorted(found)] == pytest.approx([value for *_, value in sorted(expected)], rel=1e-6)
    scalars = [
        {"step": step, "train/loss": loss(step), "train/grad_norm": step}
        | ({"validation/loss": 2 * loss(step)} if step % 5 == 0 else {})
        for step in range(first, last + 1)
    ]
    assert [{key: value for key, value in line.items() if key != "time"} for line in lines(run)] == scalars


def in_process(target, *args) -> int:
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join()
    return process.exitcode


def train_and_die(run: Path, resume_step: int, last_step: int, checkpoint_step: int) -> None:
    """Record up to `last_step`, flushing at `checkpoint_step` only, then vanish as if killed."""
    monitor = Monitor(run, resume_step)
    for step in range(resume_step + 1, last_step + 1):
        record(monitor, step)
        if step == checkpoint_step:
            monitor.flush()
    os.kill(os.getpid(), 9)


def test_points_before_a_checkpoint_survive_a_kill_right_after_it(tmp_path):
    assert in_process(train_and_die, tmp_path, 0, 25, 25) == -9
    assert_one_point_per_step(tmp_path, 1, 25)


def test_a_crash_at_150_resumed_at_100(tmp_path):
    assert in_process(train_and_die, tmp_path, 0, 150, 100) == -9
    Monitor(tmp_path, 100).close()
    assert_one_point_per_step(tmp_path, 1, 100)
    monitor = Monitor(tmp_path, 100)
    for step in range(101, 201):
        record(monitor, step)
    monitor.close()
    assert_one_point_per_step(tmp_path, 1, 200)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3


def train_with_checkpoints(run: Path, last_step: int) -> None:
    """A whole run: resume from the last step noted as a checkpoint, flush and note one every 7 steps."""
    note = run / "checkpoint"
    resume_step = int(note.read_text()) if note.exists() else 0
    monitor = Monitor(run, resume_step)
    if resume_step == 0:
        record(monitor, 0)
    for step in range(resume_step + 1, last_step + 1):
        record(monitor, step)
        if step % 7 == 0:
            monitor.flush()
            fresh = run / "checkpoint.new"
            fresh.write_text(str(step))
            fresh.replace(note)
    monitor.close()


def test_kills_at_random_moments(tmp_path):
    chance = random.Random(11)
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    undisturbed.mkdir()
    run.mkdir()
    began = time.monotonic()
    train_with_checkpoints(undisturbed, 1000)
    seconds = time.monotonic() - began
    ends = []
    for _ in range(30):
        process = multiprocessing.get_context("fork").Process(target=train_with_checkpoints, args=(run, 1000))
        process.start()
        process.join(chance.uniform(0, seconds / 8))
        process.kill()
        process.join()
        ends.append(process.exitcode)
    assert ends.count(-9) >= 10
    train_with_checkpoints(run, 1000)
    assert_one_point_per_step(run, 0, 1000)


def test_a_fresh_start_removes_all_that_an_attempt_without_a_checkpoint_wrote(tmp_path):
    monitor = Monitor(tmp_path, 0)
    record(monitor, 0)
    record(monitor, 1)
    monitor.close()
    monitor = Monitor(tmp_path, 0)
    assert points(tmp_path) == []
    assert lines(tmp_path) == []
    record(monitor, 0)
    monitor.close()
    assert_one_point_per_step(tmp_path, 0, 0)


def test_a_last_record_torn_at_any_byte_is_removed(tmp_path):
    monitor = Monitor(tmp_path, 0)
    for step in range(1, 4):
        record(monitor, step)
    monitor.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    metrics = tmp_path / "metrics.jsonl"
    whole_events, whole_metrics = events.read_bytes(), metrics.read_bytes()
    for torn in range(1, 40):
        events.write_bytes(whole_events[:-torn])
        metrics.write_bytes(whole_metrics[:-torn])
        monitor = Monitor(tmp_path, 3)
        record(monitor, 4)
        monitor.close()
        assert Counter((tag, step) for tag, step, _ in points(tmp_path)) == Counter(
            (tag, step)
            for step in range(1, 5)
            for tag in TAGS[:2]
            if (tag, step) != ("train/grad_norm", 3)  # its record was the last and the torn one
        )
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 4]
        for path in (tmp_path / "tensorboard").iterdir():
            path.unlink()
        metrics.unlink()


def test_files_with_nothing_to_remove_are_left_alone(tmp_path):
    monitor = Monitor(tmp_path, 0)
    for step in range(1, 6):
        record(monitor, step)
    monitor.close()
    files = [*(tmp_path / "tensorboard").iterdir(), tmp_path / "metrics.jsonl"]
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
    Monitor(tmp_path, 5).close()
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files] == before


def test_figures_that_are_no_numbers_stay_what_they_are(tmp_path):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5}
    monitor = Monitor(tmp_path, 0)
    monitor.scalars(1, values)
    monitor.histogram(1, "gamma", torch.tensor([[1.0, math.nan], [math.inf, 2.0]], dtype=torch.bfloat16))
    monitor.histogram(1, "nothing finite", torch.tensor([math.nan]))
    monitor.close()

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert [line[tag] for tag in "abcd"] == ["NaN", "Infinity", "-Infinity", 1.5]
    assert str([float(line[tag]) for tag in "abcd"]) == str(list(values.values()))
    board = {tag: value for tag, _, value in points(tmp_path)}
    assert str([board[tag] for tag in "abcd"]) == str(list(values.values()))
    assert board["gamma"] == 2
    assert "nothing finite" not in board


def test_a_step_already_written_is_refused(tmp_path):
    monitor = Monitor(tmp_path, 7)
    for stale in (0, 7):
        with pytest.raises(ValueError, match=f"Figures of step {stale} came after"):
            monitor.scalars(stale, {"a": 1.0})
    monitor.scalars(8, {"a": 1.0})
    monitor.scalars(8, {"b": 2.0})
    monitor.scalars(9, {"a": 3.0})
    with pytest.raises(ValueError, match="Figures of step 8 came after"):
        monitor.histogram(8, "h", torch.ones(2))
    monitor.flush()
    with pytest.raises(ValueError, match="Figures of step 9 came after"):
        monitor.scalars(9, {"b": 4.0})
    monitor.close()
    assert [{key: line[key] for key in line if key != "time"} for line in lines(tmp_path)] == [
        {"step": 8, "a": 1.0, "b": 2.0},
        {"step": 9, "a": 3.0},
    ]
    assert sorted(points(tmp_path)) == [("a", 8, 1.0), ("a", 9, 3.0), ("b", 8, 2.0)]


def test_flush_brings_all_that_is_written_to_the_disk(tmp_path, monkeypatch):
    synced: dict[str, int] = {}
    real = os.fsync

    def spy(descriptor):
        real(descriptor)
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    monitor = Monitor(tmp_path, 0)
    record(monitor, 0)
    monkeypatch.setattr(os, "fsync", spy)
    monitor.flush()
    assert_one_point_per_step(tmp_path, 0, 0)
    files = [*(tmp_path / "tensorboard").iterdir(), tmp_path / "metrics.jsonl"]
    assert synced == {str(path): path.stat().st_size for path in files}
    monitor.close()


@pytest.mark.parametrize("figures", ["scalars", "histograms"])
def test_a_full_disk_ends_in_one_line(tmp_path, figures):
    """The kernel refuses to let a file grow past a limit, which every write meets as it would meet a full disk."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        monitor = Monitor(tmp_path, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        try:
            for step in range(100):
                if figures == "scalars":
                    monitor.scalars(step, {"train/loss": 1.0})
                else:
                    monitor.histogram(step, "gamma", torch.arange(30.0))
                monitor.flush()
        except DiskFullError as error:
            os._exit(error.exit_code if "No space left to write" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_attempt_that_has_lost_the_folder_cuts_nothing(tmp_path):
    with Monitor(tmp_path, 0) as monitor:
        monitor.scalars(1, {"train/loss": 1.0})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fence() -> None:
        raise FencedError("Attempt 2 has taken over.")

    with pytest.raises(FencedError):
        Monitor(tmp_path, 0, fence)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
