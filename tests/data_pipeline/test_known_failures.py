"""Failures that users of comparable systems reported of data loading; docs/known-failures.md lists the reports."""

import multiprocessing
import os
import re
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from mesatron_data.errors import DataError
from mesatron_data.stream import TrainStream

BATCH = 12
ORDER: dict[str, Any] = {"seed": 7, "num_canonical_nodes": 3, "shuffle_block_size": 200}
NOBODY = 65534


def _read(answer: Connection, folder: Path, cache: Path | None, steps: int, limit: int, user: int) -> None:
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    try:
        stream = TrainStream(str(folder), BATCH, workers=2, cache_folder=cache, **ORDER)
        answer.send(ids(stream, steps))
    except DataError as error:
        answer.send(f"{type(error).__name__} {error}")
    answer.recv()


@contextmanager
def reading(
    folder: Path, cache: Path | None, steps: int = 3, limit: int = 0, user: int = 0
) -> Iterator[tuple[Any, int]]:
    """Another process that reads, says what or why not, and waits until the block ends; that, and its id."""
    context = multiprocessing.get_context("fork")  # what another user may not import is there already
    here, there = context.Pipe()
    process = context.Process(target=_read, args=(there, folder, cache, steps, limit, user), daemon=True)
    process.start()
    assert process.pid
    try:
        assert here.poll(120)
        yield here.recv(), process.pid
    finally:
        process.kill()
        process.join()


def ids(stream: TrainStream, steps: int) -> list[list[int]]:
    return [next(stream).sample_ids.tolist() for _ in range(steps)]


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data", ignore=shutil.ignore_patterns("unpacked"))


def test_a_killed_run_leaves_nothing_that_the_next_could_trip_over(copy: Path, tmp_path: Path) -> None:
    left = set(Path(tempfile.gettempdir()).glob("[0-9]*_*"))
    with reading(copy, tmp_path / "cache") as (first, pid):
        assert not re.search(r"/dev/shm/\d{6}_", Path(f"/proc/{pid}/maps").read_text())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        folder = next((tmp_path / "cache").rglob("train"))
        host = os.uname().nodename
        for number, process in enumerate((pid, os.getpid())):
            (folder / f".shard.0000{number}.mds.{host}-{process}-7").touch()
        (folder / ".shard.00002.mds.elsewhere-1-7").touch()
        os.utime(folder / ".shard.00002.mds.elsewhere-1-7", (0, 0))
        with reading(copy, tmp_path / "cache") as (again, second):
            assert again == first == again
    assert isinstance(first, list)
    assert set(Path(tempfile.gettempdir()).glob("[0-9]*_*")) <= left
    names = {path.name for path in folder.glob(".shard*")}
    unfinished = {name for name in names if f"-{second}-" in name}  # what the end of the second one may have cut short
    assert names - unfinished == {f".shard.00001.mds.{host}-{os.getpid()}-7"}


def test_rank_and_world_are_those_that_the_run_gives(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TrainStream(str(prepared), BATCH, **ORDER)
    expected = ids(plain, 3)
    plain.close()
    for variables in ({"RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "1"}, {"WORLD_SIZE": "4"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        shares = []
        for rank in range(2):
            stream = TrainStream(str(prepared), BATCH, rank, 2, **ORDER)
            shares.append(ids(stream, 3))
            stream.close()
        assert [one + other for one, other in zip(*shares, strict=True)] == expected


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; tmp_path is its owner's alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_two_users_read_the_same_folder(prepared: Path, open_folder: Path) -> None:
    """Each with a cache of its own; then the second from the first one's cache, which it may read but not write."""
    data = shutil.copytree(prepared, open_folder / "data", ignore=shutil.ignore_patterns("unpacked"))
    own, other = open_folder / "own", open_folder / "other"
    other.mkdir()
    os.chown(other, NOBODY, NOBODY)
    with reading(data, own, steps=20) as (expected, _), reading(data, other, steps=20, user=NOBODY) as (second, _):
        assert isinstance(expected, list)
        assert second == expected
        with reading(data, own, steps=20, user=NOBODY) as (third, _):
            assert third == expected
        gone = min(own.rglob("shard.*.mds"))
        gone.unlink()
        with reading(data, own, steps=20, user=NOBODY) as (fourth, _):
            assert fourth.startswith(
                f"DataError Cannot unpack shard {gone.name}.zstd into {gone.parent}: Permission denied"
            )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_a_data_folder_that_may_not_be_written(prepared: Path, open_folder: Path) -> None:
    """It is read where another user has unpacked all there is, and else data.cache_folder is what helps."""
    data = shutil.copytree(prepared, open_folder / "data", ignore=shutil.ignore_patterns("unpacked"))
    with reading(data, None, user=NOBODY) as (refused, _):
        assert refused.startswith(f"DataError Cannot unpack shards into {data}/unpacked/")
        assert refused.endswith(": Permission denied; name a folder that can be written to in data.cache_folder.")
    with reading(data, None, steps=20) as (expected, _), reading(data, None, steps=20, user=NOBODY) as (found, _):
        assert isinstance(expected, list)
        assert found == expected


def test_epochs_end_together_for_any_ranks_and_readers(prepared: Path) -> None:
    """Five epochs of a number of samples that nothing divides; every rank in a thread of its own, none waits for
    another."""
    plain = TrainStream(str(prepared), BATCH, **ORDER)
    steps = 5 * plain.steps_per_epoch
    assert plain.dropped_samples
    expected = ids(plain, steps)
    plain.close()
    seen: dict[int, list[list[int]]] = {}

    def read(rank: int) -> None:
        stream = TrainStream(str(prepared), BATCH, rank, 3, workers=4, **ORDER)
        seen[rank] = ids(stream, steps)
        assert stream.state_dict()["epoch"] == 5
        stream.close()

    ranks = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(120)
    assert [one + two + three for one, two, three in zip(*map(seen.get, range(3)), strict=True)] == expected


def test_eight_jobs_at_one_instant_fetch_each_shard_once(copy: Path, tmp_path: Path) -> None:
    begin = threading.Barrier(8)
    streams: list[TrainStream] = []

    def read() -> None:
        begin.wait()
        stream = TrainStream(str(copy), BATCH, cache_folder=tmp_path / "cache", workers=1, **ORDER)
        streams.append(stream)
        ids(stream, stream.steps_per_epoch + 1)
        stream.close()

    jobs = [threading.Thread(target=read, daemon=True) for _ in range(8)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    packed = sum(path.stat().st_size for path in (copy / "train").glob("*.zstd"))
    assert len(streams) == 8
    assert sum(stream.figures()["fetched_bytes"] for stream in streams) == packed


def test_a_disk_that_is_full_while_shards_are_unpacked(copy: Path, tmp_path: Path) -> None:
    with reading(copy, tmp_path / "cache", limit=1000) as (said, _):
        assert said.startswith("DiskFullError No space left to unpack shard shard.0000")
        end = time.monotonic() + 30
        while left := list((tmp_path / "cache").rglob("*shard*")):  # another thread may still be at it
            assert time.monotonic() < end, left
            time.sleep(0.1)
