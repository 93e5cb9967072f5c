"""The Makefile in a folder of any name."""

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
    done = subprocess.run(["make", "quickstart"], cwd=folder, capture_output=True, text=True)
    assert done.stdout == f"{verb}\n", done.stderr
