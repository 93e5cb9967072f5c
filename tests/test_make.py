"""The Makefile in a folder of any name."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_quickstart_finds_the_verbs_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a \"b\" '$c' `d` #1 ü"
    verb = folder / ".venv/bin/mesatron"
    verb.parent.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / ".venv/.installed").touch()
    verb.write_text("#!/bin/sh\n")
    verb.chmod(0o755)
    (folder / "launchers").mkdir()
    (folder / "launchers/quickstart.sh").write_text("command -v mesatron")
    # These tests may have been started by make, which then speaks of its folders.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "quickstart"], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{verb}\n", done.stderr
