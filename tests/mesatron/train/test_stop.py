"""A run that is asked to stop saves one step in all processes and ends with the code that says who asked.

Signals are real and hit one process only, several times; sabotage.py sends them at the moment a test names. The run
that was stopped must equal, bit for bit, one that was not. An older attempt that has lost the folder is a real process.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesatron.cluster.job import JOB_FILE, LAUNCH_FOLDER, Job
from mesatron.cluster.request import FOR_USER, request_stop
from mesatron.config import load_config
from mesatron.monitor.attempts import Attempt
from mesatron.train.run import SOLE_OWNER
from mesatron.train.stop import REQUEST_FILE, StopFlag, stop_signals

SABOTAGE = Path(__file__).with_name("sabotage.py")
PIPELINE = {"parallel.pipeline_size": 2, "model.width": 24, "model.heads": 4, "model.head_dim": 6}


@pytest.mark.parametrize(("processes", "special"), [(3, {"train.global_batch_size": 6}), (2, PIPELINE)])
def test_a_signal_at_any_moment_loses_nothing(
    processes: int, special: dict[str, Any], tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable,
    world: Callable, run_of: Callable,
) -> None:  # fmt: skip
    settings = {"train.steps": 13, "checkpoint.every_steps": 3, "evaluate.every_steps": 5} | special
    whole = odd_config(tmp_path / "whole", short_data, **settings)
    assert train(processes, whole).exit_code == 0
    config = odd_config(tmp_path / "stopped", short_data, **settings)
    run = run_of(config)
    moments = {"rehearse": 0, "step": 1, "save": 3, "validate": 5} if processes == 3 else {"step": 1}
    for moment, step in moments.items():
        fault = f"signal={step}" if moment == "step" else f"signal={moment}"
        outcome = world(processes, SABOTAGE, fault, "train", config)
        assert outcome.exit_code == 76, outcome.errors
        state = f"after step {step} of 13, which is saved" if step else "before the first step"
        assert outcome.error_lines == [
            f"mesatron: Stopped on the cluster's request (a signal to another process) {state}; the same job, started "
            "again, goes on from there."
        ]
        assert run.steps()[-1:] == ([step] if step else [])
        end = run.attempts()[-1]
        assert (end["event"], end["exit_code"]) == ("end", 76)
    assert train(processes, config).exit_code == 0
    run.assert_equals(run_of(whole), 13)


def test_requests_in_the_run_folder(
    tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable, world: Callable, run_of: Callable
) -> None:
    """One that a running attempt finds, one that waits for the next attempt, and one to an attempt that is over.

    A malformed one lies there before.
    """
    config = odd_config(tmp_path, short_data)
    run = run_of(config)
    request = run.path / "stop-request.json"
    run.path.mkdir(parents=True)
    request.write_text(json.dumps({"reason": "by hand", "attempt_at_most": "3"}))
    outcome = world(2, SABOTAGE, "request=3", "train", config)
    assert outcome.exit_code == 75, outcome.errors
    assert outcome.error_lines == [
        "mesatron: Stopped on request (enough) after step 2 of 6, which is saved; the same command goes on from there."
    ]
    assert not request.exists()

    request.write_text(json.dumps({"reason": "maintenance", "code": 76, "attempt_at_most": 2}))
    outcome = train(1, config)
    assert outcome.exit_code == 76, outcome.errors
    assert "(maintenance) after step 2" in outcome.errors
    assert run.steps() == [2]
    assert not request.exists()

    request.write_text(json.dumps({"reason": "late", "code": 75, "attempt_at_most": 2}))
    outcome = train(1, config)
    assert outcome.exit_code == 0, outcome.errors
    assert "Removed a request to stop attempt 2 (late)." in outcome.output
    assert not request.exists()


@pytest.mark.parametrize("request_to", ["save", "save,any"])
def test_a_request_that_comes_with_the_last_step_is_not_left_behind(
    request_to: str, tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable, run_of: Callable
) -> None:
    config = odd_config(tmp_path, short_data, **{"checkpoint.every_steps": 6})
    assert world(1, SABOTAGE, f"request={request_to}", "train", config).exit_code == 0
    assert not (run_of(config).path / "stop-request.json").exists()


@pytest.mark.parametrize(("exit_code", "is_kept"), [(0, False), (75, False), (76, True)])
def test_a_persons_request_outlasts_an_end_on_the_clusters(
    exit_code: int, is_kept: bool, tmp_path: Path, odd_config: Callable, short_data: Path
) -> None:
    """It came while the last step was being saved; whoever queues the job again has to know."""
    config = load_config(odd_config(tmp_path, short_data))
    config.run_folder.mkdir(parents=True)
    handlers = {number: signal.getsignal(number) for number in stop_signals(config)}
    try:
        flag = StopFlag(config)
        flag.watch_folder(Attempt(config.run_folder / "attempts.jsonl", None))
        request_stop(config.run_folder, "enough", FOR_USER, 1)
        flag.honoured(exit_code)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (config.run_folder / REQUEST_FILE).exists() == is_kept


def test_a_start_of_a_job_that_comes_late_does_not_take_the_run(
    tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable, run_of: Callable
) -> None:
    """A lost network had held it up until the job was started again elsewhere."""
    config = odd_config(tmp_path, short_data)
    run = run_of(config)
    launch = run.path / LAUNCH_FOLDER
    launch.mkdir(parents=True)
    (launch / JOB_FILE).write_text(json.dumps(Job("6", ["n2"], 1, 1, str(launch / "words-6-1")).__dict__))
    late = train(1, config, environment={SOLE_OWNER: "6-0"})
    assert late.exit_code == 78, late.errors
    assert late.error_lines == [f"mesatron: A later start of the job has taken over {run.path}, so this one ends."]
    assert not (run.path / "attempts.jsonl").exists()
    assert train(1, config, environment={SOLE_OWNER: "6-1"}).exit_code == 0


def files_of(run: Any) -> dict[Path, bytes]:
    """All but the log of attempts."""
    paths = [path for path in run.path.rglob("*") if path.is_file() and path.name != "attempts.jsonl"]
    return {path: path.read_bytes() for path in paths}


@pytest.mark.parametrize(("sabotage", "told"), [("wait=5", [("decision", 1, 4)]), ("wait=5,weight", [])])
def test_an_attempt_that_has_lost_the_folder_writes_nothing_more(
    sabotage: str, told: list, tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable, run_of: Callable
) -> None:
    """Nor, where it meets a gradient that is not finite, the layer's inputs.

    The lock holds on one machine. Removing its file stands for a network file system on which it does not.
    """
    whole = odd_config(tmp_path / "whole", short_data, **{"train.steps": 9})
    assert train(1, whole).exit_code == 0
    settings = {"train.steps": 9, "checkpoint.every_steps": 2, "checkpoint.asynchronous": False}
    config = odd_config(tmp_path / "run", short_data, **settings)
    run = run_of(config)
    command = [sys.executable, str(SABOTAGE), sabotage, "train", str(config)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as stale:
        assert stale.stdout is not None
        assert any(line.startswith("step 4: saved") for line in stale.stdout)
        (run.path / ".lock").unlink()
        outcome = train(1, config)
        assert outcome.exit_code == 0, outcome.errors
        assert "Attempt 1 ended without a word" in outcome.output
        before = files_of(run)
        _, errors = stale.communicate("go on\n", timeout=120)
    assert stale.returncode == 78
    assert errors.splitlines() == [
        f"mesatron: Attempt 2 on {run.attempts()[3]['host']} has taken over {run.path}, so attempt 1 ends without "
        "writing anything more."
    ]
    assert files_of(run) == before
    records = run.attempts()
    assert [record["event"] for record in records[:6]] == ["start", "ready", "end"] * 2
    assert [(x["event"], x["attempt"], x["step"]) for x in records[6:]] == told
    assert all(record["what"] in errors for record in records[6:])
    run.assert_equals(run_of(whole), 9)
