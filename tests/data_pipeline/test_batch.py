"""Pieces of a batch along its sequences, against the tokens of the whole one taken one by one."""

import numpy as np
import pytest
import torch
from mesatron_data.batch import Batch, collate
from mesatron_data.pack import Sample


def batch_of(starts: list[list[int]], length: int) -> Batch:
    draw = np.random.default_rng(0)
    samples = [
        Sample(
            tokens=draw.integers(2, 99, length + 1).astype(np.uint16),
            document_starts=np.array(row, dtype=np.int32),
            sources=np.arange(len(row), dtype=np.uint16),
        )
        for row in starts
    ]
    return collate(samples, list(range(len(samples))), bos_id=1)


@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_pieces_are_runs_of_every_sequence(pieces: int) -> None:
    batch = batch_of([[0, 3, 4, 11], [0], [0, 6, 8, 9, 10], [0, 12]], length=12)
    run = 12 // pieces
    begins = set(batch.cu_seqlens[:-1].tolist())
    for index in range(pieces):
        piece = batch.piece(index, pieces)
        here = slice(index * run, (index + 1) * run)
        for name in ("tokens", "targets", "sources"):
            assert torch.equal(getattr(piece, name), getattr(batch, name)[:, here])
        assert torch.equal(piece.sample_ids, batch.sample_ids)
        expected = [
            row * run + position
            for row in range(4)
            for position in range(run)
            if row * 12 + index * run + position in begins
        ]
        assert piece.cu_seqlens.tolist() == [*expected, 4 * run]


def test_the_last_target_of_a_piece_is_the_next_piece() -> None:
    batch = batch_of([[0, 5]], length=12)
    first, second = (batch.piece(index, 2) for index in range(2))
    assert first.targets[0, -1] == second.tokens[0, 0]
