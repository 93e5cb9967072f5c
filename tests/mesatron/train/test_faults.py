"""What goes wrong ends in one line, a documented exit code and an intact run, which the same command then continues.

Most faults are brought about for real: damaged files, a locked folder, limits on files and memory. Non-finite gradients
of one process in one step come from sabotage.py.
"""

import fcntl
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mesatron.checkpoint.verify import list_checkpoints
from mesatron.cluster.job import FINAL_CODES
from mesatron.errors import PeerLostError, StorageError

SABOTAGE = Path(__file__).with_name("sabotage.py")


@pytest.fixture(scope="module")
def trained_config(tmp_path_factory: pytest.TempPathFactory, odd_config: Callable, short_data: Path) -> Path:
    """The config of a run of 6 steps that has been stopped at step 4, with checkpoints of steps 2 and 4."""
    config = odd_config(tmp_path_factory.mktemp("faults"), short_data, **{"checkpoint.every_steps": 2})
    command = [sys.executable, "-m", "mesatron", "train", str(config), "--stop-at-step=4"]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 75
    return config


@pytest.fixture
def config(trained_config: Path, tmp_path: Path) -> Path:
    """A copy of that run for a test to spoil."""
    folder = tmp_path / "copy"
    shutil.copytree(trained_config.parent, folder, symlinks=True)
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace(str(trained_config.parent / "runs"), str(folder / "runs")))
    return path


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def make_unreadable(path: Path) -> None:
    """To read the beginning of a process's memory is an input/output error."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (flip_byte, "weights-00000.safetensors", "the checksum of weights-00000.safetensors differs: tensor "),
        (cut_short, "optimizer-00000.safetensors", "optimizer-00000.safetensors has "),
        (cut_short, "manifest.json", "manifest.json is damaged"),
        (make_unreadable, "manifest.json", "manifest.json cannot be read (Input/output error)"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    damage: Callable, file: str, reason: str, config: Path, train: Callable, run_of: Callable
) -> None:
    run = run_of(config)
    damage(run.checkpoint(4) / file)
    outcome = train(1, config)
    assert outcome.exit_code == 0, outcome.errors
    (note,) = [line for line in outcome.output.splitlines() if "Passing over" in line]
    assert str(run.checkpoint(4)) in note
    assert reason in note
    assert f"continues {run.checkpoint(2)}" in outcome.output
    (decision,) = [record for record in run.attempts() if record["event"] == "decision"]
    assert (decision["attempt"], decision["step"]) == (2, 2)
    assert decision["what"].startswith(f"went on without {run.checkpoint(4)}: ")
    assert (run.path / "checkpoints/damaged-step-00000004-attempt-0002").is_dir()
    assert run.steps() == [2, 4, 6]
    assert all(info.status == "complete" for info in list_checkpoints(run.path / "checkpoints", deep=True)[:1])
    steps = [line["step"] for line in run.lines()]
    assert steps == sorted(set(steps))


def last_shard(data: Path, copy: Path) -> tuple[Path, Path]:
    """A copy of prepared data, and the last shard for training in it."""
    shutil.copytree(data, copy)
    return copy, sorted((copy / "train").glob("*.zstd"))[-1]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_damaged_shard_is_named_before_training(
    processes: int, tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable, run_of: Callable
) -> None:
    data, shard = last_shard(short_data, tmp_path / "shards")
    flip_byte(shard)
    config = odd_config(tmp_path, data)
    outcome = train(processes, config)
    assert outcome.exit_code == 3
    assert len(outcome.error_lines) == 1
    assert str(shard) in outcome.errors
    end = run_of(config).attempts()[-1]
    assert (end["event"], end["exit_code"]) == ("end", 3)


@pytest.mark.parametrize("processes", [1, 2])
def test_storage_that_fails_is_worth_another_start(
    processes: int, tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable, run_of: Callable
) -> None:
    data, shard = last_shard(short_data, tmp_path / "shards")
    whole = shutil.copy(shard, tmp_path)
    make_unreadable(shard)
    config = odd_config(tmp_path, data)
    outcome = train(processes, config)
    assert outcome.exit_code == StorageError.exit_code
    assert StorageError.exit_code not in FINAL_CODES
    assert outcome.error_lines == [
        f"mesatron: Cannot read shard {shard}: Input/output error; start the same command again once its storage "
        "answers."
    ]
    assert run_of(config).attempts()[-1]["exit_code"] == StorageError.exit_code
    shard.unlink()
    shutil.move(whole, shard)
    assert train(processes, config).exit_code == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_skipped_step_changes_nothing_and_is_counted(
    stage: int, tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable, run_of: Callable
) -> None:
    """Infinite gradients of one of two processes in steps 3, 5, 6 and 7; three in a row end the run."""
    settings = {
        "train.steps": 9, "train.max_skipped_steps": 3, "checkpoint.every_steps": 1, "checkpoint.keep_last": 9,
        "parallel.zero_stage": stage, "train.warmup_steps": 0,
    }  # fmt: skip
    config = odd_config(tmp_path, short_data, **settings)
    run = run_of(config)
    outcome = world(2, SABOTAGE, "inf=3,5,6,7", "train", config)
    assert outcome.exit_code == 5, outcome.errors
    assert outcome.error_lines == [
        "mesatron: The last 3 gradients up to step 7 were not finite; lower train.peak_lr, or raise "
        "train.max_skipped_steps to go on from the last checkpoint."
    ]
    assert run.curve("train/skipped_steps") == [0, 0, 1, 1, 2, 3]
    skipped = [line for line in outcome.output.splitlines() if "the update is skipped" in line]
    assert [line.split(":")[0] for line in skipped] == ["step 3", "step 5", "step 6", "step 7"]
    assert run.checksums(3) == run.checksums(2)
    assert run.checksums(4) != run.checksums(3)
    assert run.checksums(6) == run.checksums(4)
    state = json.loads((run.checkpoint(6) / "state.json").read_text())
    assert (state["optimizer_steps"], state["skipped_steps"]) == (3, 3)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_diverging_run_ends_and_says_so_each_time(
    stage: int, tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable
) -> None:
    """The second start goes on from weights that give no finite gradient, and remembers the skipped step before it."""
    settings = {"train.peak_lr": 1e30, "train.warmup_steps": 0, "train.max_skipped_steps": 2, "train.steps": 30}
    settings |= {"checkpoint.every_steps": 1, "parallel.zero_stage": stage}
    config = odd_config(tmp_path, short_data, **settings)
    for _ in range(2):
        outcome = train(2, config)
        assert outcome.exit_code == 5, outcome.errors
        assert outcome.error_lines == [
            "mesatron: The last 2 gradients up to step 3 were not finite; lower train.peak_lr, or raise "
            "train.max_skipped_steps to go on from the last checkpoint."
        ]


def test_nothing_starts_over_when_no_checkpoint_verifies(config: Path, train: Callable, run_of: Callable) -> None:
    """A run whose checkpoints this version cannot read keeps its curves and folders."""
    run = run_of(config)
    for step in (2, 4):
        flip_byte(run.checkpoint(step) / "manifest.json")
    before = {
        path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != "attempts.jsonl"
    }
    outcome = train(2, config)
    assert outcome.exit_code == 4
    assert len(outcome.error_lines) == 1
    assert "No checkpoint in" in outcome.errors
    assert {path: path.read_bytes() for path in before} == before


def test_checkpoints_that_cannot_be_read_yet_are_worth_another_start(
    config: Path, train: Callable, run_of: Callable
) -> None:
    run = run_of(config)
    flip_byte(run.checkpoint(4) / "manifest.json")
    manifest = run.checkpoint(2) / "manifest.json"
    content = manifest.read_bytes()
    make_unreadable(manifest)
    outcome = train(2, config)
    assert outcome.exit_code == StorageError.exit_code
    (line,) = outcome.error_lines
    assert "verifies (step-00000002: manifest.json cannot be read (Input/output error)); start the same command" in line
    assert run.steps() == [2, 4]
    manifest.unlink()
    manifest.write_bytes(content)
    assert f"continues {run.checkpoint(2)}" in train(1, config).output


def test_a_bad_checkpoint_that_cannot_be_set_aside_is_passed_over(
    config: Path, world: Callable, run_of: Callable
) -> None:
    run = run_of(config)
    make_unreadable(run.checkpoint(4) / "manifest.json")
    outcome = world(1, SABOTAGE, "stuck=step-00000004", "train", config, "checkpoint.every_steps=3")
    assert outcome.exit_code == 0, outcome.errors
    assert "note       step-00000004 cannot be set aside: Input/output error." in outcome.output
    assert f"continues {run.checkpoint(2)}" in outcome.output
    assert run.steps() == [2, 3, 4, 6]


def test_stopping_at_a_step_that_is_done_trains_nothing(config: Path, train: Callable, run_of: Callable) -> None:
    lines = run_of(config).lines()
    outcome = train(1, config, "--stop-at-step=3")
    assert outcome.exit_code == 75
    assert "Stopped as asked after step 4 of 6" in outcome.errors
    assert run_of(config).lines() == lines


def test_changes_that_alter_the_result_are_refused(config: Path, train: Callable, run_of: Callable) -> None:
    waved_through = {"train.peak_lr=1e-3": True, "train.steps=8": True}
    for change, possible in (waved_through | {"train.seed=1": False, "train.global_batch_size=4": False}).items():
        outcome = train(1, config, change)
        assert outcome.exit_code == 2
        assert len(outcome.error_lines) == 1
        assert change.split("=")[0] in outcome.errors
        assert ("--allow-changes" in outcome.errors) == possible
    assert train(1, config, "train.seed=1", "--allow-changes").exit_code == 2
    outcome = train(1, config, "model.layers=3")
    assert outcome.exit_code == 4
    assert "model.layers: 2 -> 3" in outcome.errors

    harmless = {"monitor.log_every_steps": 2, "checkpoint.every_steps": 1, "parallel.zero_stage": 2}
    outcome = train(2, config, *(f"{key}={value}" for key, value in harmless.items()), "--stop-at-step=5")
    assert outcome.exit_code == 75, outcome.errors
    for key, value in harmless.items():
        assert any(key in line and line.endswith(f"-> {value}.") for line in outcome.output.splitlines())
    outcome = train(1, config, "train.peak_lr=1e-3", environment={"MESATRON_ALLOW_CHANGES": "1"})
    assert outcome.exit_code == 0, outcome.errors
    assert "train.peak_lr: 0.003 -> 0.001" in outcome.output
    assert run_of(config).lines()[-1]["train/learning_rate"] == pytest.approx(1e-4)


def test_a_checkpoint_of_another_model_is_refused(config: Path, train: Callable, run_of: Callable) -> None:
    """By the config in the checkpoint, whatever lies in the run folder; and where that is waved through, by tensors."""
    (run_of(config).path / "config.yaml").unlink()
    for options, reason in (
        ([], "holds another model (model.layers: 2 -> 1)"),
        (["--allow-changes"], "belongs to another model: its tensor blocks.1"),
    ):
        outcome = train(2, config, "model.layers=1", *options)
        assert outcome.exit_code == 4
        assert len(outcome.error_lines) == 1
        assert reason in outcome.errors


def test_a_full_disk_during_a_save_leaves_the_earlier_checkpoints(
    config: Path, train: Callable, run_of: Callable
) -> None:
    """Files of the second save may not grow to the size that optimizer-00000.safetensors needs."""
    run = run_of(config)
    before = run.checksums(4)
    limit = (run.checkpoint(4) / "optimizer-00000.safetensors").stat().st_size // 2
    for processes in (1, 2):
        command = [sys.executable, "-m", "mesatron", "train", str(config), f"--processes={processes}"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit // processes, limit // processes)),
        )  # fmt: skip
        assert done.returncode == 7, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("mesatron: No space left to write ")
        assert run.checksums(4) == before
        assert not list((run.path / "checkpoints").glob(".incomplete-*"))
        assert run.attempts()[-1]["exit_code"] == 7
    assert train(1, config).exit_code == 0
    assert run.steps() == [2, 4, 6]


@pytest.mark.parametrize("stage", [0, 1])
def test_one_process_that_cannot_write_ends_all_at_a_step_boundary(
    stage: int, config: Path, world: Callable, run_of: Callable
) -> None:
    """The second of two, in a run of so many steps that it would notice its end only much later."""
    run = run_of(config)
    overrides = [f"parallel.zero_stage={stage}", "train.steps=90", "checkpoint.every_steps=6", "--allow-changes"]
    outcome = world(2, SABOTAGE, "full=5", "train", config, *overrides)
    assert outcome.exit_code == 7, outcome.errors
    (line,) = outcome.error_lines
    assert line.startswith(f"mesatron: No space left to write {run.path / 'checkpoints/.incomplete-step-00000006'}")
    assert run.steps() == [2, 4]
    assert not list((run.path / "checkpoints").glob(".incomplete-*"))
    assert run.attempts()[-1]["exit_code"] == 7
    assert 6 <= run.lines()[-1]["step"] <= 12


def test_a_process_that_loses_the_others_in_a_save_ends_all(config: Path, world: Callable, run_of: Callable) -> None:
    """It cannot tell them by the way they agree on a save, but they meet in the steps."""
    overrides = ["train.steps=90", "checkpoint.every_steps=6", "--allow-changes"]
    outcome = world(2, SABOTAGE, "deaf=5", "train", config, *overrides)
    assert outcome.exit_code == PeerLostError.exit_code, outcome.errors
    assert run_of(config).steps() == [2, 4]
    assert 6 <= run_of(config).lines()[-1]["step"] <= 12


def test_two_trainings_in_one_run_folder(config: Path, train: Callable, run_of: Callable) -> None:
    before = run_of(config).attempts()
    with (run_of(config).path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for processes in (1, 2):
            outcome = train(processes, config)
            assert outcome.exit_code == 2
            assert outcome.error_lines == [
                f"mesatron: Another process trains in {run_of(config).path}; wait for it or choose another name."
            ]
    assert run_of(config).attempts() == before


def test_a_step_that_does_not_fit_into_memory(
    tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable
) -> None:
    """Told by the rehearsal, before anything is trained."""
    config = odd_config(tmp_path, short_data, **{"train.global_batch_size": 8192, "train.micro_batch_size": 8192})
    outcome = world(1, SABOTAGE, f"memory={200 << 20}", "train", config)
    assert outcome.exit_code == 6, outcome.errors
    assert outcome.error_lines == [
        "mesatron: 8192 sequences of 19 tokens at a time (or 8 in validation) do not fit into the memory of cpu; lower "
        "train.micro_batch_size or evaluate.micro_batch_size, or raise parallel.zero_stage."
    ]
