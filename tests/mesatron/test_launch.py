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
    assert errors == "mesatron: interrupted; the same command goes on from the last checkpoint.\n"
    assert psutil.wait_procs(tree, timeout=10)[1] == []
    assert not [path for path in Path("/dev/shm").glob("*_locals") if str(short_data).encode() in path.read_bytes()]
    assert not list((tmp_path / "temporary").iterdir())


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
    assert not list(temporary.iterdir())
