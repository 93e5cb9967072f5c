"""The training order: what each global batch holds, for any number of ranks and readers and any interruption, against
one plain run; batches against the stored samples; damaged data and slow storage against the error expected."""

import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mesatron_data.batch import IGNORED_TARGET, Batch
from mesatron_data.errors import DataError, StorageError
from mesatron_data.manifest import load_manifest
from mesatron_data.mds import read_samples
from mesatron_data.shards import prepare
from mesatron_data.stream import TrainStream, ValidationSet, epoch_order

GLOBAL_BATCH = 12
CONTEXT_LENGTH = 16
ORDER: dict[str, Any] = {"seed": 7, "num_canonical_nodes": 3, "shuffle_block_size": 200}


@contextmanager
def opened(folder: Path, **settings: Any) -> Iterator[TrainStream]:
    stream = TrainStream(str(folder), **({"global_batch_size": GLOBAL_BATCH} | ORDER | settings))
    try:
        yield stream
    finally:
        stream.close()


def ids(stream: TrainStream, steps: int) -> list[list[int]]:
    return [next(stream).sample_ids.tolist() for _ in range(steps)]


def joined(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The global batches, given each rank's sample ids of each step."""
    return [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def plain(prepared: Path) -> list[list[int]]:
    """Sample ids of each step of two epochs and a bit, one rank, no interruption."""
    with opened(prepared) as stream:
        return ids(stream, 2 * stream.steps_per_epoch + 5)


def test_an_epoch_repeats_nothing_and_counts_what_it_leaves_out(prepared: Path, plain: list[list[int]]) -> None:
    samples = load_manifest(str(prepared)).splits["train"].samples
    with opened(prepared) as stream:
        steps = stream.steps_per_epoch
        assert stream.dropped_samples == samples - steps * GLOBAL_BATCH > 0
    epochs = [np.concatenate(plain[:steps]), np.concatenate(plain[steps : 2 * steps])]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == len(epoch) == steps * GLOBAL_BATCH
        assert 0 <= epoch.min() <= epoch.max() < samples
    assert not np.array_equal(*epochs)
    assert sorted(epochs[0].tolist()) != epochs[0].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_global_batches_do_not_depend_on_ranks_and_readers(
    prepared: Path, plain: list[list[int]], world_size: int, workers: int
) -> None:
    ranks = []
    for rank in range(world_size):
        with opened(prepared, rank=rank, world_size=world_size, workers=workers) as stream:
            ranks.append(ids(stream, len(plain)))
            assert [stream.global_batch(number) for number in range(len(plain))] == plain
    assert joined(ranks) == plain


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_three_interruptions_change_nothing(prepared: Path, plain: list[list[int]], workers: int) -> None:
    """Stops within an epoch, right before, at and after its end; each leg has another number of ranks, readers read
    ahead."""
    with opened(prepared) as stream:
        steps = stream.steps_per_epoch
    for stops in ([1, 3, 8], [steps - 1, steps, steps + 1], [steps, steps + 2, 2 * steps]):
        state: dict[str, Any] | None = None
        seen: list[list[int]] = []
        for leg, stop in enumerate([*stops, len(plain)]):
            world_size = (1, 3, 2, 4)[leg]
            ranks, states = [], []
            for rank in range(world_size):
                with opened(prepared, rank=rank, world_size=world_size, workers=workers) as stream:
                    if state is not None:
                        stream.load_state_dict(state)
                    ranks.append(ids(stream, stop - len(seen)))
                    states.append(stream.state_dict())
            assert all(other == states[0] for other in states)
            state = json.loads(json.dumps(states[0]))
            assert (state["epoch"], state["step_in_epoch"]) == divmod(stop, steps)
            seen += joined(ranks)
        assert seen == plain


def test_the_position_counts_batches_handed_out(prepared: Path) -> None:
    with opened(prepared, workers=2) as stream:
        assert stream.state_dict()["step_in_epoch"] == 0
        for step in range(1, 4):
            next(stream)
            assert stream.state_dict()["step_in_epoch"] == step


def test_a_position_of_other_data_or_order_is_refused(prepared: Path) -> None:
    with opened(prepared) as stream:
        state = stream.state_dict()
    for change in (
        {"seed": 8},
        {"num_canonical_nodes": 4},
        {"shuffle_block_size": 9},
        {"shuffle": False},
        {"global_batch_size": 24},
    ):
        (name,) = change
        with opened(prepared, **change) as stream, pytest.raises(DataError, match=f"saved data position has {name}"):
            stream.load_state_dict(state)
    with opened(prepared) as stream:
        with pytest.raises(DataError, match="saved data position has fingerprint '0'"):
            stream.load_state_dict(state | {"fingerprint": "0"})
        next(stream)
        with pytest.raises(RuntimeError, match="before the first batch"):
            stream.load_state_dict(state)


def test_order_settings() -> None:
    shards = np.array([50, 50, 30, 50, 7])
    plain = epoch_order(shards, 1, 0, False, 4, 100)
    assert plain.tolist() == list(range(187))
    orders = [
        epoch_order(shards, *key, True, nodes, 100).tolist()
        for *key, nodes in [(1, 0, 4), (1, 1, 4), (2, 0, 4), (1, 0, 3)]
    ]
    for order in orders:
        assert sorted(order) == plain.tolist()
    assert len({tuple(order) for order in orders}) == 4
    assert sorted(epoch_order(np.array([2]), 1, 0, True, 8, 100).tolist()) == [0, 1]


def test_consecutive_samples_come_from_the_parts_in_turn_and_shards_are_read_one_after_another() -> None:
    order = epoch_order(np.full(40, 10), 1, 0, True, 4, 20)
    parts = [order[part::4] // 10 for part in range(4)]
    assert sorted(shard for part in parts for shard in set(part.tolist())) == list(range(40))
    for part in parts:
        for shard in set(part.tolist()):
            places = np.flatnonzero(part == shard)
            assert places[-1] - places[0] < 25  # 1.25 times the block


def test_batches_equal_the_stored_samples(prepared: Path) -> None:
    manifest = load_manifest(str(prepared))
    stored = list(read_samples(prepared, "train"))
    with opened(prepared) as stream:
        batches = [next(stream) for _ in range(stream.steps_per_epoch)]
    assert any(sample.document_starts[-1] == CONTEXT_LENGTH for sample in stored), "no document begins at a last token"
    for batch in batches:
        bounds = []
        for row, sample_id in enumerate(batch.sample_ids.tolist()):
            sample = stored[sample_id]
            tokens = sample.tokens.astype(np.int64)
            assert batch.tokens[row].tolist() == tokens[:-1].tolist()
            assert batch.targets[row].tolist() == [
                IGNORED_TARGET if token == manifest.bos_id else token for token in tokens[1:]
            ]
            owner = [
                sample.sources[np.searchsorted(sample.document_starts, place, side="right") - 1]
                for place in range(1, 17)
            ]
            assert batch.sources[row].tolist() == owner
            bounds += [row * 16 + place for place in range(16) if place == 0 or tokens[place] == manifest.bos_id]
        assert batch.cu_seqlens.tolist() == [*bounds, GLOBAL_BATCH * 16]
        assert (batch.tokens.dtype, batch.targets.dtype, batch.cu_seqlens.dtype) == (
            torch.int64,
            torch.int64,
            torch.int32,
        )


def same(first: Batch, second: Batch) -> bool:
    return all(torch.equal(value, getattr(second, name)) for name, value in vars(first).items())


def test_split_gives_the_batches_of_its_parts(prepared: Path) -> None:
    with opened(prepared, shuffle=False) as stream:
        whole = next(stream)
    parts = whole.split(5)
    assert [len(part.tokens) for part in parts] == [5, 5, 2]
    validation = [whole.split(1)[row] for row in range(GLOBAL_BATCH)]
    for part, begin in zip(parts, (0, 5, 10), strict=True):
        assert part.cu_seqlens[0] == 0
        assert part.cu_seqlens[-1] == len(part.tokens) * CONTEXT_LENGTH
        assert same(part.split(1)[1], validation[begin + 1])
    lengths = torch.cat([part.cu_seqlens.diff() for part in parts])
    assert torch.equal(lengths, whole.cu_seqlens.diff())
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_reads_each_sample_once(prepared: Path, world_size: int) -> None:
    samples = load_manifest(str(prepared)).splits["validation"].samples
    seen = []
    for rank in range(world_size):
        validation = ValidationSet(str(prepared), 4, rank=rank, world_size=world_size, workers=2)
        first, second = list(validation), list(validation)
        assert all(map(same, first, second))
        assert len(first) == len(second) == len(validation)
        seen += [sample for batch in first for sample in batch.sample_ids.tolist()]
        assert [sample for batch in first for sample in batch.sample_ids.tolist()] == list(
            range(rank, samples, world_size)
        )
    assert sorted(seen) == list(range(samples))


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_first_validation_samples_are_the_same_for_all_numbers_of_ranks(prepared: Path, world_size: int) -> None:
    seen = []
    for rank in range(world_size):
        validation = ValidationSet(str(prepared), 2, rank=rank, world_size=world_size, max_samples=3)
        batches = list(validation.first(5))
        assert all(len(batch.tokens) <= 2 for batch in batches)
        seen += [sample for batch in batches for sample in batch.sample_ids.tolist()]
    assert sorted(seen) == list(range(5))


def test_too_little_data_and_unequal_shares(prepared: Path) -> None:
    with pytest.raises(DataError, match=r"holds \d+ training samples, fewer than one global batch of 100000"):
        TrainStream(str(prepared), 100_000)
    with pytest.raises(DataError, match="batch of 10 sequences cannot be shared by 3 processes"):
        TrainStream(str(prepared), 10, world_size=3)


def test_a_missing_folder_and_a_url_without_cache(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No manifest.json in .*nowhere"):
        TrainStream(str(tmp_path / "nowhere"), 1)
    with pytest.raises(DataError, match="is remote: name a cache folder"):
        TrainStream("s3://bucket/data", 1)


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    """A fresh copy of the prepared folder, shards packed only."""
    return shutil.copytree(prepared, tmp_path / "data", ignore=shutil.ignore_patterns("unpacked"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def read_epoch(folder: Path, **settings: Any) -> None:
    with opened(folder, timeout_seconds=20, **settings) as stream:
        ids(stream, stream.steps_per_epoch)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_damaged_shard_is_named_with_its_hashes(copy: Path, workers: int) -> None:
    shard = copy / "train/shard.00002.mds.zstd"
    flip(shard)
    with pytest.raises(DataError, match=rf"Shard {shard} is damaged \(xxh64 [0-9a-f]+, expected [0-9a-f]+\)"):
        read_epoch(copy, workers=workers)


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / "train/shard.00002.mds.zstd").unlink()
    with pytest.raises(DataError, match=r"Cannot read shard shard.00002.mds.zstd of .*train"):
        read_epoch(copy)


def test_a_shard_whose_storage_fails_is_no_damage(copy: Path) -> None:
    """To read the beginning of a process's memory is an input/output error."""
    (copy / "train/shard.00002.mds.zstd").unlink()
    (copy / "train/shard.00002.mds.zstd").symlink_to("/proc/self/mem")
    with pytest.raises(StorageError, match=r"Cannot read shard shard.00002.mds.zstd of .*train: Input/output error"):
        read_epoch(copy)


def test_a_damaged_unpacked_shard_is_unpacked_again(copy: Path, plain: list[list[int]]) -> None:
    read_epoch(copy)
    (unpacked,) = copy.rglob("train/shard.00001.mds")
    good = unpacked.read_bytes()
    flip(unpacked)
    read_epoch(copy)
    assert unpacked.read_bytes() == good


def test_two_machines_unpack_one_folder(copy: Path, plain: list[list[int]], tmp_path: Path) -> None:
    """A folder under two names has, like one seen from two machines, readers that do not know of each other. What
    another machine is about to write, under the name that streaming gives it, is left alone."""
    (tmp_path / "elsewhere").symlink_to(copy)
    begun = [path.with_suffix(".tmp") for path in (copy / "train").glob("*.zstd")]
    for path in begun:
        path.write_text("half")
    with opened(copy, workers=4) as here, opened(tmp_path / "elsewhere", workers=4) as there:
        for expected in plain:
            assert next(here).sample_ids.tolist() == next(there).sample_ids.tolist() == expected
    assert {path.read_text() for path in begun} == {"half"}
    assert not list(copy.rglob(".shard*"))


def test_an_index_of_other_shards_is_refused(copy: Path) -> None:
    index = json.loads((copy / "train/index.json").read_text())
    del index["shards"][-1]
    (copy / "train/index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="is not that of its manifest"):
        TrainStream(str(copy), 4)


@pytest.mark.usefixtures("locks_of_nfs")
@pytest.mark.parametrize("limit_bytes", [0, 1 << 20])
def test_shards_are_unpacked_on_nfs(copy: Path, plain: list[list[int]], tmp_path: Path, limit_bytes: int) -> None:
    cache = tmp_path / "cache" if limit_bytes else None
    with opened(copy, cache_folder=cache, cache_limit_bytes=limit_bytes) as stream:
        assert ids(stream, len(plain)) == plain


def test_a_run_whose_data_are_prepared_anew_ends(
    copy: Path, records: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    """It has unpacked and checked every shard, and so has another run, in the same folder, as many of the new data."""
    shutil.copytree(records, tmp_path / "in")
    (tmp_path / "in/train/b.jsonl").rename(tmp_path / "in/train/0.jsonl")
    with opened(copy, workers=0) as stream:
        ids(stream, stream.steps_per_epoch)
        prepare(str(tmp_path / "in"), copy, tokenizer_path, CONTEXT_LENGTH, shard_bytes=3000, overwrite=True)
        read_epoch(copy)
        with pytest.raises(DataError, match=r"unpacked/\w+/train was removed while a run read from it"):
            next(stream)


def test_a_cache_folder_is_shared_and_mended_and_leaves_the_data_alone(
    copy: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    before = sorted(copy.rglob("*"))
    cache = tmp_path / "cache"
    with opened(copy, cache_folder=cache) as stream, opened(copy, cache_folder=cache, workers=2) as other:
        for expected in plain:
            assert next(stream).sample_ids.tolist() == next(other).sample_ids.tolist() == expected
    flip(next(cache.rglob("shard.00000.mds")))
    with opened(copy, cache_folder=cache) as stream:
        assert ids(stream, stream.steps_per_epoch) == plain[: stream.steps_per_epoch]
    assert sorted(copy.rglob("*")) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_does_not_come_is_an_error(prepared: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(prepared, workers=workers, timeout_seconds=0.3) as stream:
        next(stream)
        storage = threading.Event()
        read = stream._reader.read

        def slow(sample_id: int) -> Any:
            storage.wait()
            return read(sample_id)

        monkeypatch.setattr(stream._reader, "read", slow)
        with pytest.raises(DataError, match=r"Training batch \d+ did not arrive within 0.3 s"):
            ids(stream, 20)
        storage.set()


def test_closing_ends_the_readers(prepared: Path) -> None:
    before = threading.active_count()
    with opened(prepared, workers=3) as stream:
        next(stream)
        assert threading.active_count() == before + 3
    assert threading.active_count() == before


def test_one_sequence_samples(prepare_texts: Callable[..., Path]) -> None:
    """The smallest possible data: one sample, batch of one, for several epochs."""
    folder = prepare_texts(["the of and to in a is that for it as was with be by on"])
    with opened(folder, global_batch_size=1, workers=2) as stream:
        samples = stream.steps_per_epoch
        assert sorted(itertools.chain(*ids(stream, samples))) == list(range(samples))
        assert stream.state_dict()["epoch"] == 1
