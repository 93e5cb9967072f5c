"""Files written at the same time under one name, and what killed processes leave, against what is to be there."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mesatron_data.files import partial_path, remove_partial, write_atomically
from mesatron_data.tokenizer_training import train_tokenizer
from mesatron_data.verify import verify_once

WRITE = """
import sys
from pathlib import Path
from mesatron_data.files import write_atomically
for number in range(200):
    write_atomically(Path(sys.argv[1]), sys.argv[2].encode() * 1000)
"""


def test_writers_of_one_name_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "name"
    processes = [subprocess.Popen([sys.executable, "-c", WRITE, str(path), letter]) for letter in "ab"]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda letter: [write_atomically(path, letter * 1000) for _ in range(200)], [b"c", b"d"]))
    assert [process.wait() for process in processes] == [0, 0]
    content = path.read_bytes()
    assert content == content[:1] * 1000
    assert list(tmp_path.iterdir()) == [path]


def leave(path: Path) -> Path:
    """The temporary file of a process that ended before it was renamed."""
    code = """if True:
        import sys
        from pathlib import Path
        from mesatron_data.files import partial_path
        path = partial_path(Path(sys.argv[1]))
        path.touch()
        print(path)
    """
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    return Path(done.stdout.rstrip())


def test_only_what_ended_processes_of_this_machine_had_begun_is_removed(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    dead = leave(tmp_path / "deep/a-1.jsonl.tokens")
    alive = partial_path(tmp_path / "b")
    elsewhere = dead.with_name(dead.name.replace(os.uname().nodename, f"more-{os.uname().nodename}-1"))
    for path in (alive, elsewhere):
        path.touch()
    assert dead.exists()
    remove_partial(tmp_path)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {alive, elsewhere}


@pytest.mark.parametrize("what", ["verified data", "a tokenizer"])
def test_leftovers_are_removed_where_the_same_is_written_again(
    prepared: Path, records: Path, tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "folder"
    if what == "verified data":
        shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("unpacked"))
        left = leave(folder / "verified.json")
        verify_once(folder)
    else:
        folder.mkdir()
        left = leave(folder / "training.json")
        train_tokenizer(str(records), folder, 290)
    assert not left.exists()
