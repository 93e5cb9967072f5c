"""Packing: the samples against the token stream BOS document BOS document ... built by plain concatenation."""

import numpy as np
import pytest
from mesatron_data.pack import Documents, Sample, cut, sample_count

BOS = 1


def pack(documents: list[list[int]], length: int) -> tuple[list[Sample], int]:
    stream = np.array([token for ids in documents for token in [BOS, *ids]], np.uint16)
    begins = np.flatnonzero(stream == BOS)
    _, tail = sample_count(len(stream), length)
    return list(cut(Documents(stream, begins, np.arange(len(documents), dtype=np.uint16)), length)), tail


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 100])
def test_samples_hold_the_stream(length: int) -> None:
    draw = np.random.default_rng(length)
    documents = [draw.integers(2, 500, size=draw.integers(0, 40)).tolist() for _ in range(50)]
    samples, tail = pack(documents, length)
    stream = [token for ids in documents for token in [BOS, *ids]]
    owner = [number for number, ids in enumerate(documents) for _ in [BOS, *ids]]
    assert len(samples) == (len(stream) - 1) // length
    assert tail == len(stream) - 1 - len(samples) * length
    for number, sample in enumerate(samples):
        begin = number * length
        assert sample.tokens.dtype == np.uint16
        assert sample.tokens.tolist() == stream[begin : begin + length + 1]
        starts = [0] + [place for place in range(1, length + 1) if stream[begin + place] == BOS]
        assert sample.document_starts.tolist() == starts
        assert sample.sources.tolist() == [owner[begin + start] for start in starts]


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_documents_around_the_length_of_a_sample(extra: int) -> None:
    samples, tail = pack([[5] * (8 + extra)] * 3, 8)
    targets = [token for sample in samples for token in sample.tokens[1:].tolist()]
    assert targets == (([BOS] + [5] * (8 + extra)) * 3)[1 : len(targets) + 1]
    assert len(targets) + tail + 1 == 3 * (9 + extra)


def test_a_stream_shorter_than_a_sample_is_all_tail() -> None:
    samples, tail = pack([[5, 6]], 3)
    assert samples == []
    assert tail == 3


def test_any_run_of_samples_can_be_cut_by_itself() -> None:
    draw = np.random.default_rng(0)
    documents = [draw.integers(2, 500, size=draw.integers(0, 40)).tolist() for _ in range(50)]
    whole, _ = pack(documents, 7)
    stream = np.array([token for ids in documents for token in [BOS, *ids]], np.uint16)
    begins = np.flatnonzero(stream == BOS)
    for first, end in [(0, 1), (3, 9), (20, len(whole))]:
        low = int(np.searchsorted(begins, first * 7, side="right")) - 1
        sources = np.arange(low, len(documents), dtype=np.uint16)
        part = list(cut(Documents(stream[first * 7 : end * 7 + 1], begins[low:] - first * 7, sources), 7))
        assert [str(vars(sample)) for sample in part] == [str(vars(sample)) for sample in whole[first:end]]
