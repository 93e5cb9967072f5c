"""Mixtures: orders against shares and repeats counted by hand, streams of data packed by source against one plain
stream, and what is packed by source against the same documents packed together."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mesatron_data.batch import collate
from mesatron_data.errors import DataError
from mesatron_data.manifest import MAX_SOURCES, load_manifest
from mesatron_data.mds import read_samples
from mesatron_data.mixture import mixed_order, shares_of
from mesatron_data.pack import Sample
from mesatron_data.plan import Options
from mesatron_data.shards import prepare
from mesatron_data.stream import TrainStream
from numpy.typing import NDArray

BATCH = 12
WEIGHTS = {"RedPajamaBook": 6.0, "RedPajamaArXiv": 3.0}
ORDER: dict[str, Any] = {"seed": 7, "num_canonical_nodes": 2, "shuffle_block_size": 200}


def shuffled(first: int, end: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return first + np.random.default_rng([seed, epoch]).permutation(end - first)


def test_an_epoch_has_the_shares_to_within_a_sample_and_repeats_as_late_as_it_can() -> None:
    samples = {"a": 40, "b": 7, "c": 100}
    shares = shares_of(samples, {"a": 2, "b": 1, "c": 1})
    epochs = [mixed_order(samples, shares, 5, epoch, shuffled) for epoch in range(4)]
    begins = {"a": 0, "b": 40, "c": 47}
    for order in epochs:
        assert len(order) == 147
        for name, share in shares.items():
            own = (order >= begins[name]) & (order < begins[name] + samples[name])
            assert abs(own.sum() - share * 147) < 1
            for end in range(1, 148):
                assert abs(own[:end].sum() - share * end) <= 1.5
    row = np.concatenate(epochs)
    for name, count in samples.items():
        own = row[(row >= begins[name]) & (row < begins[name] + count)]
        rounds = [own[begin : begin + count] for begin in range(0, len(own), count)]
        assert all(len(set(one.tolist())) == len(one) for one in rounds), "none comes again before all others"
        assert len(rounds) > 1 or name == "c"
        if len(rounds) > 1:
            assert not np.array_equal(rounds[0], rounds[1]), "each round has an order of its own"
    assert np.array_equal(mixed_order(samples, shares, 5, 2, shuffled), epochs[2])


def test_natural_shares_read_everything_once() -> None:
    samples = {"a": 40, "b": 7, "c": 100}
    for epoch in range(2):
        order = mixed_order(samples, shares_of(samples, None), 5, epoch, shuffled)
        assert sorted(order.tolist()) == list(range(147))


def test_weights_that_do_not_fit_the_data() -> None:
    with pytest.raises(DataError, match="names the source x, but the prepared data have a, b"):
        shares_of({"a": 1, "b": 1}, {"x": 1})
    with pytest.raises(DataError, match="The source b fills no sample"):
        shares_of({"a": 1, "b": 0}, {"a": 1, "b": 1})
    with pytest.raises(DataError, match="asks for nothing"):
        shares_of({"a": 1, "b": 1}, {"a": 0})


@pytest.fixture(scope="module")
def by_source(records: Path, tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by-source") / "data"
    prepare(str(records), folder, tokenizer_path, 16, shard_bytes=3000, options=Options(by_source=True))
    return folder


def test_each_source_is_packed_by_itself(by_source: Path, prepared: Path) -> None:
    """The stream of each source is what the stream of all sources holds of it, and samples count up in its name."""
    manifest, together = load_manifest(str(by_source)), load_manifest(str(prepared))
    samples = list(read_samples(by_source, "train"))
    all_tokens = {name: [] for name in manifest.sources}
    stored = list(read_samples(prepared, "train"))
    for number, sample in enumerate(stored):
        of_token = np.repeat(sample.sources, np.diff(sample.document_starts, append=17))
        for token, source in list(zip(sample.tokens.tolist(), of_token.tolist(), strict=True))[bool(number) :]:
            all_tokens[together.sources[source]].append(token)
    begin = 0
    for name, count in manifest.splits["train"].source_samples.items():
        own = samples[begin : begin + count]
        assert {manifest.sources[source] for sample in own for source in sample.sources.tolist()} == {name}
        stream = own[0].tokens.tolist() + [token for sample in own[1:] for token in sample.tokens[1:].tolist()]
        common = min(len(stream), len(all_tokens[name]))
        assert stream[:common] == all_tokens[name][:common]
        assert len(stream) > len(all_tokens[name]) - 17
        begin += count
    assert begin == len(samples) == manifest.splits["train"].samples
    assert manifest.splits["train"].sources == together.splits["train"].sources
    assert not manifest.splits["validation"].source_samples
    assert manifest.fingerprint != together.fingerprint


def ids(stream: TrainStream, steps: int) -> list[list[int]]:
    return [next(stream).sample_ids.tolist() for _ in range(steps)]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("workers", [0, 4])
def test_a_mixture_does_not_depend_on_ranks_readers_and_interruptions(
    by_source: Path, world_size: int, workers: int
) -> None:
    plain = TrainStream(str(by_source), BATCH, weights=WEIGHTS, **ORDER)
    steps = 2 * plain.steps_per_epoch + 3
    expected = ids(plain, steps)
    plain.close()
    state: dict[str, Any] | None = None
    seen: list[list[int]] = []
    for stop in (2, plain.steps_per_epoch, steps):
        ranks = []
        for rank in range(world_size):
            stream = TrainStream(str(by_source), BATCH, rank, world_size, weights=WEIGHTS, workers=workers, **ORDER)
            if state is not None:
                stream.load_state_dict(state)
            ranks.append(ids(stream, stop - len(seen)))
            after = stream.state_dict()
            stream.close()
        state = json.loads(json.dumps(after))
        seen += [list(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
    assert seen == expected


def test_every_batch_has_the_mixture_asked_for(by_source: Path) -> None:
    manifest = load_manifest(str(by_source))
    stream = TrainStream(str(by_source), BATCH, weights=WEIGHTS, **ORDER)
    assert stream.shares == {"RedPajamaBook": 2 / 3, "RedPajamaArXiv": 1 / 3, "RedPajamaGithub": 0.0}
    total: Counter[str] = Counter()
    for _ in range(stream.steps_per_epoch):
        batch = next(stream)
        present = Counter(manifest.sources[source] for source in batch.sources[:, 0].tolist())
        assert abs(present["RedPajamaBook"] - 8) <= 1
        total += present
    stream.close()
    assert abs(total["RedPajamaBook"] / sum(total.values()) - 2 / 3) < 0.01
    assert total["RedPajamaGithub"] == 0
    natural = TrainStream(str(by_source), BATCH, **ORDER)
    seen = [sample for batch in ids(natural, natural.steps_per_epoch) for sample in batch]
    natural.close()
    assert len(set(seen)) == len(seen) == natural.steps_per_epoch * BATCH


def records_of(path: Path, sources: Iterable[str]) -> None:
    """A file with one long record of each source."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": "of and to in" * 4, "meta": {"redpajama_set_name": name}}) for name in sources]
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("numbers", "where"), [((32_769, 1), "train/0.jsonl"), ((20_000, 20_000), "all files together")]
)
def test_sources_without_a_number_are_refused(
    tokenizer_path: Path, tmp_path: Path, numbers: tuple[int, int], where: str
) -> None:
    for file, number in enumerate(numbers):
        records_of(tmp_path / f"in/train/{file}.jsonl", (f"source {file} {index}" for index in range(number)))
    records_of(tmp_path / "in/validation/a.jsonl", ["source 0 0"])
    with pytest.raises(DataError, match=rf"The records of {where} name more than 32,768 sources"):
        prepare(str(tmp_path / "in"), tmp_path / "out", tokenizer_path, 16)


def test_the_last_source_that_has_a_number_keeps_it_in_a_batch() -> None:
    sample = Sample(np.arange(9, dtype=np.uint16), np.zeros(1, np.int32), np.array([MAX_SOURCES - 1], np.uint16))
    assert set(collate([sample], [0], 1).sources.flatten().tolist()) == {MAX_SOURCES - 1}


def test_mixtures_that_cannot_be(by_source: Path, prepared: Path) -> None:
    with pytest.raises(DataError, match=r"was packed without regard to sources: prepare it again with data.weights"):
        TrainStream(str(prepared), BATCH, weights=WEIGHTS)
    with pytest.raises(DataError, match="names the source Poems"):
        TrainStream(str(by_source), BATCH, weights={"Poems": 1.0})
    stream = TrainStream(str(by_source), BATCH, weights=WEIGHTS, **ORDER)
    state = stream.state_dict()
    for other in (None, {"RedPajamaBook": 1.0}):
        changed = TrainStream(str(by_source), BATCH, weights=other, **ORDER)
        with pytest.raises(DataError, match="saved data position has weights"):
            changed.load_state_dict(state)
