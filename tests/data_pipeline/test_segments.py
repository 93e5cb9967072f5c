"""Real processes: what is left in /dev/shm and the temporary folder after an orderly end and after kill -9, and what
two ranks of a gloo group read and report, against one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mesatron_data.errors import DataError
from mesatron_data.segments import remove_stale
from mesatron_data.stream import TrainStream, ValidationSet

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of its own for the lock files of this process and its children."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def left_behind(folder: Path) -> set[str]:
    """Names of segments and lock files that belong to `folder` or to nobody; other runs may be going on."""
    names = set()
    for place in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        for path in place.glob("[0-9][0-9][0-9][0-9][0-9][0-9]_*"):
            owner = SHARED_MEMORY / f"{path.name[:6]}_locals"
            if not owner.exists() or f"{folder}/".encode() in owner.read_bytes():
                names.add(path.name)
    return names


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Iterator[Path]:
    """A fresh copy of the prepared folder; what a failing test leaves in shared memory for it is removed."""
    yield shutil.copytree(prepared, tmp_path / "data", ignore=shutil.ignore_patterns("*.mds"))
    remove_stale(tmp_path / "data/train")


def test_an_orderly_end_leaves_nothing(copy: Path) -> None:
    train, validation = TrainStream(str(copy), 12, workers=2), ValidationSet(str(copy), 4)
    next(train)
    assert len(list(validation)) == len(validation)
    assert len(left_behind(copy)) >= 16  # six segments and two lock files each
    train.close()
    validation.close()
    assert left_behind(copy) == set()


HOLD = """
import sys
from mesatron_data.stream import TrainStream
stream = TrainStream(sys.argv[1], 12, workers=2)
for _ in range(3): next(stream)
print("reading", flush=True)
sys.stdin.read()
"""


def held(folder: Path) -> "subprocess.Popen[str]":
    """A process of its own session that has the folder open and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    return process


def test_after_a_kill_the_next_start_works_and_removes_only_what_is_stale(copy: Path, tmp_path: Path) -> None:
    other = shutil.copytree(copy, tmp_path / "other", ignore=shutil.ignore_patterns("*.mds"))
    with held(copy) as killed, held(other) as living:
        # The whole session at once, as a batch system does, so that Python's own tracker cannot clean up.
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        stale, used = left_behind(copy), left_behind(other)
        assert len(stale) >= 8
        remove_stale(other / "train")
        assert left_behind(copy) == stale, "what belongs to another folder is left alone"
        stream = TrainStream(str(copy), 12)
        next(stream)
        stream.close()
        assert left_behind(copy) == set()
        assert left_behind(other) == used, "what a living process uses is left alone"
        living.communicate("")
    remove_stale(other / "train")
    assert left_behind(other) == set()


RANK = """
import json, os, sys, torch
from mesatron_data.errors import DataError
from mesatron_data.stream import TrainStream, ValidationSet
folder, meeting, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
rank = settings.pop("rank")
torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
try:
    train = TrainStream(folder, 12, rank=rank, world_size=2, timeout_seconds=60, **settings)
    validation = ValidationSet(folder, 4, rank=rank, world_size=2, timeout_seconds=60)
    ids = [next(train).sample_ids.tolist() for _ in range(2 * train.steps_per_epoch + 3)]
    seen = [sample for batch in validation for sample in batch.sample_ids.tolist()]
    torch.distributed.barrier()
    validation.close()
    train.close()
    print(json.dumps([ids, seen]))
except DataError as error:
    print(json.dumps(str(error)))
torch.distributed.destroy_process_group()
"""


def two_ranks(folder: Path, tmp_path: Path, launch: dict[str, str], **settings: Any) -> list[Any]:
    """Run two processes, one a rank, and return what each printed."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(tmp_path / "meeting"), json.dumps(settings | {"rank": rank})],
            env=clean | {name: value.format(rank=rank) for name, value in launch.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for output, errors in results:
        assert output, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in results]


TORCHRUN = {"RANK": "{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "{rank}", "LOCAL_WORLD_SIZE": "2"}


def test_two_ranks_share_the_order_of_one(copy: Path, tmp_path: Path) -> None:
    (first, first_validation), (second, second_validation) = two_ranks(copy, tmp_path, TORCHRUN, workers=2)
    assert left_behind(copy) == set()
    train, validation = TrainStream(str(copy), 12), ValidationSet(str(copy), 4)
    assert [one + two for one, two in zip(first, second, strict=True)] == [
        next(train).sample_ids.tolist() for _ in first
    ]
    expected = [sample for batch in validation for sample in batch.sample_ids.tolist()]
    train.close()
    validation.close()
    assert sorted(first_validation + second_validation) == expected


def test_a_damaged_shard_is_named_on_both_ranks(copy: Path, tmp_path: Path) -> None:
    shard = copy / "train/shard.00002.mds.zstd"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    for message in two_ranks(copy, tmp_path, TORCHRUN):
        assert message.startswith(f"Shard {shard} is damaged (xxh64 ")


def test_a_launch_without_local_ranks_is_refused(copy: Path, tmp_path: Path) -> None:
    launch = {"RANK": "{rank}", "WORLD_SIZE": "2"}
    for message in two_ranks(copy, tmp_path, launch):
        assert "LOCAL_RANK, LOCAL_WORLD_SIZE" in message


def test_unset_variables_mean_one_process(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DataError, match="fewer than one global batch"):
        TrainStream(str(copy), 1_000_000)
