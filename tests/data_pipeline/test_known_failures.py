"""Failures that users of comparable systems reported (data loading and tokenization), each a row and its test.

What the rows say, and where it is tested (in this folder unless another is named):

    14  next run trips over shared memory of a killed one  here
    15  ranks taken from the launcher, not from the run    here
    16  a second user on the node gets no permission       here
    18  cache limit below what is needed                   test_store: ..._keeps_to_its_limit_and_changes_nothing;
                                                           mesatron/train/test_remote_data: ..._refused_with_the_number
    19  hang when an epoch ends                            here; mesatron/train/test_resume (3 processes, 3 epochs)
    20  a loaded position is not gone on from, or only     test_stream: test_three_interruptions_change_nothing,
        the first time                                     test_a_position_of_other_data_or_order_is_refused;
                                                           test_mixture: ..._ranks_readers_and_interruptions
    22  a damaged shard ends the data early, hangs or      test_store: ..._on_its_way_is_fetched_again,
        gives wrong samples                                test_a_damaged_object_...; test_stream:
                                                           test_a_damaged_shard_is_named_with_its_hashes
    23  resume at an epoch's end trains nothing            mesatron/train/test_resume: ..._cut_anywhere_... (stop=5, 10)
    24  another number of processes loses samples          test_stream: test_three_interruptions_... (1, 3, 2, 4 ranks);
                                                           mesatron/train/test_moves
    24b tensor ranks read different samples                mesatron/parallel/test_exchange: test_tensor_parallel
    50  an empty first document                            test_shards: test_odd_documents_everywhere
    51  the token that ends a document is lost             test_shards: test_stored_shards_decode_to_the_documents;
                                                           test_choice: test_best_fit_cuts_only_what_does_not_fit
    52  NUL, surrogates, marks and separators              test_records: ..._unchanged, test_changed_characters_...;
                                                           test_tokenizer: test_odd_texts_round_trip (both kinds)
    54  out of memory while a tokenizer is trained         test_tokenizer_training: test_memory_is_guarded_...,
                                                           test_peak_memory_is_within_what_is_reckoned_with

    24c every process allocates on the first GPU           mesatron/parallel/test_exchange:
                                                           test_a_process_holds_memory_on_its_own_gpu_alone
"""

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


def _read(answer: Connection, folder: Path, cache: Path, steps: int, limit: int, user: int) -> None:
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
def reading(folder: Path, cache: Path, steps: int = 3, limit: int = 0, user: int = 0) -> Iterator[tuple[Any, int]]:
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
    return shutil.copytree(prepared, tmp_path / "data", ignore=shutil.ignore_patterns("*.mds"))


def test_14_a_killed_run_leaves_nothing_that_the_next_could_trip_over(copy: Path, tmp_path: Path) -> None:
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
        with reading(copy, tmp_path / "cache") as (again, _):
            assert again == first == again
    assert isinstance(first, list)
    assert set(Path(tempfile.gettempdir()).glob("[0-9]*_*")) <= left
    assert [path.name for path in folder.glob(".shard*")] == [f".shard.00001.mds.{host}-{os.getpid()}-7"]


def test_15_rank_and_world_are_those_that_the_run_gives(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_16_two_users_read_the_same_folder(prepared: Path, open_folder: Path) -> None:
    """Each with a cache of its own; then the second from the first one's cache, which it may read but not write."""
    data = shutil.copytree(prepared, open_folder / "data", ignore=shutil.ignore_patterns("*.mds"))
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
            assert fourth.startswith(f"DataError Cannot read shard {gone.name}.zstd of ")
            assert "Permission denied" in fourth


def test_19_epochs_end_together_for_any_ranks_and_readers(prepared: Path) -> None:
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
