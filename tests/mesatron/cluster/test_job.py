"""A start of a job settles its own affairs only; the rest of this module runs on the cluster of tests/slurm."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mesatron.cluster.history import History
from mesatron.cluster.job import JOB_FILE, LAUNCH_FOLDER, UNFIT_FILE, Job, settle
from mesatron.config import load_config
from mesatron.errors import ConfigError, FencedError


def test_a_start_that_was_replaced_queues_nothing(
    tmp_path: Path, tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was cut off; the job has been queued again and started elsewhere, under the same id."""
    config = load_config(tiny_config(tmp_path))
    launch = config.run_folder / LAUNCH_FOLDER
    launch.mkdir(parents=True)
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm's commands
    for restarts in (1, 0):
        note = Job("6", ["n2", "n3"], 1, 2, str(launch / f"words-6-{restarts}"))
        (launch / JOB_FILE).write_text(json.dumps(note.__dict__))
        if restarts:
            with pytest.raises(FencedError, match="A later start of the job has taken over"):
                settle(config)
        else:
            with pytest.raises(ConfigError, match="scontrol is not on PATH"):
                settle(config)
    assert not (config.run_folder / "attempts.jsonl").exists()


def test_damaged_notes_of_preflight_are_said_and_block_nothing(
    tmp_path: Path, tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_config(tmp_path))
    launch = config.run_folder / LAUNCH_FOLDER
    words = launch / "words-6-0"
    words.mkdir(parents=True)
    (words / UNFIT_FILE).write_text('{"n2": "GPU 3')
    (launch / JOB_FILE).write_text(json.dumps(Job("6", ["n2"], 1, 1, str(words)).__dict__))
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm's commands
    for _ in range(2):
        with pytest.raises(ConfigError, match="scontrol is not on PATH"):
            settle(config)
    decisions = [record["what"] for record in History(config.run_folder).records("decision")]
    assert decisions == [f"no node is left out, for {words / UNFIT_FILE} is damaged"]
    assert not words.exists()


def test_outside_a_job_nothing_is_settled(
    tmp_path: Path, tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_config(tmp_path))
    launch = config.run_folder / LAUNCH_FOLDER
    launch.mkdir(parents=True)
    (launch / JOB_FILE).write_text(json.dumps(Job("6", ["n2"], 1, 2, str(launch / "words-6-0")).__dict__))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set; submit the script with sbatch"):
        settle(config)
