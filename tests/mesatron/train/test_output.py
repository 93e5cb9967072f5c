"""A run goes on to its last step when nobody reads what it prints, and what it prints is its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def test_a_reader_that_leaves(tmp_path: Path, odd_config: Callable, short_data: Path, run_of: Callable) -> None:
    config = odd_config(tmp_path, short_data, **{"train.steps": 40})
    command = [sys.executable, "-m", "mesatron", "train", str(config), "--processes=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(line.startswith("step 2/") for line in process.stdout)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(120) == 0, errors
    assert errors == "mesatron: the output cannot be written any more (Broken pipe); the run goes on.\n"
    assert len(run_of(config).curve("train/loss")) == 40
    assert run_of(config).attempts()[-1]["exit_code"] == 0


def test_no_output_at_all(tmp_path: Path, odd_config: Callable, short_data: Path, run_of: Callable) -> None:
    config = odd_config(tmp_path, short_data)
    command = f"{sys.executable} -m mesatron train {config} >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], timeout=120).returncode == 0
    assert len(run_of(config).curve("train/loss")) == 6


def test_libraries_print_nothing(tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable) -> None:
    done = train(1, odd_config(tmp_path, short_data, **{"train.steps": 3, "train.precision": "bf16"}))
    assert done.exit_code == 0, done.errors
    assert done.output.startswith("run ")
