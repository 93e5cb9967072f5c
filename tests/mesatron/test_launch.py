"""`mesatron train --processes N`: exit codes pass through, an interrupt ends everything, nothing is left behind.

Real processes, started as a person starts them; their whole tree is looked at afterwards.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start(config: Path, temporary: Path, *options: str) -> subprocess.Popen:
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "mesatron", "train", str(config), *options], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=ENVIRONMENT | {"TMPDIR": str(temporary)}, start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize("options", [["--processes=2"], []])
def test_an_interrupt_ends_in_one_line(
    options: list[str], tmp_path: Path, odd_config: Callable, short_data: Path
) -> None:
    """Ctrl-C reaches every process of the terminal's group."""
    config = odd_config(tmp_path / "run", short_data, **{"train.steps": 10_000})
    process = start(config, tmp_path / "temporary", *options)
    assert process.stdout is not None
    assert any(line.startswith("step 2/") for line in process.stdout)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors == "mesatron: interrupted; a training run goes on from its last checkpoint.\n"
    assert psutil.wait_procs(tree, timeout=10)[1] == []
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_stop_signal_reaches_the_workers(
    tmp_path: Path, odd_config: Callable, short_data: Path, run_of: Callable
) -> None:
    """From the launcher alone, which does not end them; so it does with torchrun under control groups."""
    config = odd_config(tmp_path / "run", short_data, **{"train.steps": 10_000})
    process = start(config, tmp_path / "temporary", "--processes=2")
    assert process.stdout is not None
    assert any(line.startswith("step 2/") for line in process.stdout)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 76, errors
    (line,) = errors.splitlines()
    (step,) = run_of(config).steps()
    assert line.startswith(f"mesatron: Stopped on the cluster's request (SIGTERM) after step {step} of 10000, ")
    assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_a_killed_worker_ends_the_run_in_one_line(tmp_path: Path, odd_config: Callable, short_data: Path) -> None:
    config = odd_config(tmp_path / "run", short_data, **{"train.steps": 10_000})
    process = start(config, tmp_path / "temporary", "--processes=2")
    assert process.stdout is not None
    assert any(line.startswith("step 2/") for line in process.stdout)
    workers = psutil.Process(process.pid).children(recursive=True)
    second = next(worker for worker in workers if worker.environ().get("RANK") == "1")
    second.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert errors == (
        "mesatron: process 1 was ended by SIGKILL; started again, the run goes on from its last checkpoint.\n"
    )
    assert psutil.wait_procs(workers, timeout=10)[1] == []


def test_a_launcher_killed_at_once_leaves_no_worker(tmp_path: Path, odd_config: Callable, short_data: Path) -> None:
    """Its workers are still importing torch and cannot have asked to end with it yet."""
    process = start(odd_config(tmp_path / "run", short_data), tmp_path / "temporary", "--processes=2")
    launcher = psutil.Process(process.pid)
    while len(workers := launcher.children()) < 2:
        assert process.poll() is None
    process.kill()
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    assert process.communicate()[1] == ""


def test_exit_codes_pass_through(tmp_path: Path, odd_config: Callable, short_data: Path, run_of: Callable) -> None:
    config = odd_config(tmp_path / "run", short_data)
    temporary = tmp_path / "temporary"
    process = start(config, temporary, "--processes=3")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors == (
        "mesatron: train.global_batch_size must be micro_batch_size x accumulation x data-parallel size, but 8 is no "
        "multiple of 2 x 3 = 6; change the batch sizes or the number of processes.\n"
    )
    for options, code in ([["--stop-at-step=2"], 75], [["model.layers=1"], 4], [[], 0]):
        process = start(config, temporary, "--processes=2", *options)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code, errors
        assert len(errors.splitlines()) == (code != 0), errors
    assert [record["exit_code"] for record in run_of(config).attempts() if record["event"] == "end"] == [75, 0]
    assert list(temporary.iterdir()) == []
