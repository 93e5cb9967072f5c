"""Kills at random moments lose nothing and leave nothing: a short form of kill_loop.py, which says what is compared."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).with_name("kill_loop.py")


def test_a_run_killed_at_random_moments_equals_an_untouched_one(tmp_path: Path, tiny_config: Callable) -> None:
    config = tiny_config(tmp_path, **{"model.layers": 1, "train.global_batch_size": 8})
    command = [sys.executable, str(SCRIPT), "--kills=3", "--seed=3", f"--config={config}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
