import os
import subprocess
import sys
from pathlib import Path

import pytest
from mesatron_data.workers import LONGEST_TEMPORARY_FOLDER

SCRIPT = """
import tempfile
from mesatron_data.workers import open_workers
with open_workers(2, "mesatron_data.files") as pool:
    print(pool.map(abs, [-1, 2], lambda job, result: None), tempfile.gettempdir())
"""


@pytest.mark.parametrize("longer", [0, 1])
def test_the_path_of_the_temporary_folder_may_be_too_long_for_sockets(longer: int, short_path: Path) -> None:
    length = LONGEST_TEMPORARY_FOLDER + longer - len(str(short_path)) - 1
    temporary = short_path / (length * "t")
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | {"TMPDIR": str(temporary)}, capture_output=True, text=True
    )
    assert done.stdout == f"[1, 2] {temporary}\n", done.stderr
    assert not list(temporary.glob("pymp-*"))


def test_workers_that_cannot_be_started(short_path: Path) -> None:
    program = """
import resource
from mesatron_data.workers import open_workers
resource.setrlimit(resource.RLIMIT_NOFILE, (7, 7))
with open_workers(2, "mesatron_data.files") as pool:
    pool.map(abs, [1, 2], print)
"""
    environment = os.environ | {"TMPDIR": str(short_path)}  # where it cannot remove what it has made
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "DataError: Cannot start worker processes ([Errno 24] Too many open files" in done.stderr.splitlines()[-1]
