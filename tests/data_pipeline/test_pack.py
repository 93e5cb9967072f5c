"""Packing: the samples against the token stream BOS document BOS document ... built by plain concatenation."""

import numpy as np
import pytest
from mesatron_data.pack import Packer, Sample

BOS = 1


def pack(documents: list[list[int]], length: int) -> tuple[list[Sample], int]:
    packer = Packer(length, BOS, "uint16")
    samples = [sample for number, ids in enumerate(documents) for sample in packer.add(ids, number)]
    return samples, packer.tail_tokens


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


def test_token_ids_beyond_uint16() -> None:
    packer = Packer(2, 70_000, "uint32")
    (sample,) = packer.add([65_536, 99_999], 0)
    assert sample.tokens.tolist() == [70_000, 65_536, 99_999]
