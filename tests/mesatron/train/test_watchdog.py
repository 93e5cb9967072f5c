"""A run in which a process hangs ends with exit code 77 in every process, and each says where it hung.

The hanging is real: a wait for what never comes, or SIGSTOP. Phases that are longer than the limit but show signs of
life are none of the watchdog's business.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

SABOTAGE = Path(__file__).with_name("sabotage.py")


def test_every_process_says_where_it_hangs(
    tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable, train: Callable, run_of: Callable
) -> None:
    config = odd_config(
        tmp_path, short_data, **{"train.watchdog_seconds": 8, "train.global_batch_size": 6, "checkpoint.every_steps": 2}
    )
    run = run_of(config)
    outcome = world(3, SABOTAGE, "hang=4", "train", config)
    assert outcome.exit_code == 77, outcome.errors
    (line,) = outcome.error_lines
    assert line.startswith("mesatron: Nothing has moved for 8 s on ")
    assert "of step 4; see where each process hangs in " in line
    end = run.attempts()[-1]
    assert (end["event"], end["exit_code"]) == ("end", 77)
    assert f"mesatron: {end['reason']}" == line
    stacks = {path.name: path.read_text() for path in (run.path / "stacks").iterdir()}
    assert sorted(stacks) == [f"attempt-0001-rank-{rank}.txt" for rank in range(3)]
    for rank, text in enumerate(stacks.values()):
        assert "gloo:all_reduce" in text
        assert ("sabotaged_set_lr" in text) == ("rank-2" in sorted(stacks)[rank])
    waiting = stacks["attempt-0001-rank-0.txt"]
    assert "not done" in waiting
    assert "all_reduce" in waiting.partition("Thread")[2]
    assert train(3, config).exit_code == 0


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ("before all have met", "1 of 2 processes have not come within 6 s (ranks 1); see what keeps them"),
        ("while the run is opened", "No sign of life has come from process 1 on "),
        pytest.param("in a step", "No sign of life has come from process 1 on ", marks=pytest.mark.long),
    ],
)
def test_a_stopped_process(
    tmp_path: Path, odd_config: Callable, short_data: Path, run_of: Callable, moment: str, words: str
) -> None:
    """It cannot end itself; the others do, however long their phase may take, and the launcher ends it."""
    config = odd_config(tmp_path / "run", short_data, **{"train.watchdog_seconds": 6, "train.steps": 10_000})
    attempts = run_of(config).path / "attempts.jsonl"
    command = [sys.executable, "-m", "mesatron", "train", str(config), "--processes=2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    launcher = psutil.Process(process.pid)
    # A process that has not begun its program yet has the launcher's environment.
    wait_for(lambda: ["RANK" in worker.environ() for worker in launcher.children()] == [True, True])
    workers = launcher.children()
    first, second = sorted(workers, key=lambda worker: worker.environ()["RANK"])
    if moment == "while the run is opened":
        wait_for(attempts.exists)
    elif moment == "in a step":
        assert any(line.startswith("step 2/") for line in process.stdout)
    second.suspend()
    line = process.stderr.readline()
    assert line.startswith(f"mesatron: {words}"), line
    first.wait(60)
    second.resume()  # else the launcher kills it after 30 s
    process.communicate(timeout=60)
    assert process.returncode == 77
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    if moment != "before all have met":
        # While the run is opened the first process alone knows the attempt's number.
        assert list((run_of(config).path / "stacks").glob("*-rank-0.txt"))
        assert run_of(config).attempts()[-1]["exit_code"] == 77


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_long_phases_are_no_hanging(tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable) -> None:
    """The limit is 2 s; the rehearsal takes at least 3, a validation 2.4 and a save 3."""
    config = odd_config(
        tmp_path, short_data,
        **{"train.watchdog_seconds": 2, "train.steps": 1, "train.warmup_steps": 0, "evaluate.micro_batch_size": 2,
           "train.micro_batch_size": 8},
    )  # fmt: skip
    outcome = world(1, SABOTAGE, "slow=6", "train", config)
    assert outcome.exit_code == 0, outcome.errors
