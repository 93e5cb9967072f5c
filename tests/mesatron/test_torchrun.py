"""torchrun as the launchers start it: silent after its workers, outspoken about itself, the worker's exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import os, signal, sys, time
if os.environ["RANK"] != "1":
    time.sleep(30)
sys.stderr.write("the reason\\n")
sys.stderr.flush()
{end}
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mesatron.torchrun", "--nnodes=1", "--log-dir=/dev/null", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize(
    ("end", "code", "more"),
    [
        ("sys.exit(75)", 75, ""),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            128 + signal.SIGKILL,
            "mesatron: process 1 was ended by SIGKILL; started again, the run goes on from its last checkpoint.\n",
        ),
    ],
)
def test_a_workers_end_is_one_line_and_its_code(end: str, code: int, more: str, tmp_path: Path) -> None:
    """That of the worker that failed first; the other is ended by a signal."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(end=end))
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = torchrun("--nproc-per-node=2", "--max-restarts=0", *rendezvous, str(worker))
    assert done.returncode == code, done.stderr
    assert done.stderr == f"the reason\n{more}"


def test_its_own_errors_are_said(tmp_path: Path) -> None:
    """Nobody answers at the place where all are to meet."""
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-conf=is_host=0,read_timeout=1"]
    done = torchrun("--nproc-per-node=1", *rendezvous, str(tmp_path / "none.py"))
    assert done.returncode == 1
    assert "RendezvousConnectionError" in done.stderr
