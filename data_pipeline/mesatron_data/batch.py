"""The training batch: stored samples as tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mesatron_data.pack import Sample

IGNORED_TARGET = -100


@dataclass(frozen=True)
class Batch:
    """`n` sequences of `context_length` tokens (T), on the CPU.

    tokens     [n, T] int64
    targets    [n, T] int64, the next token; IGNORED_TARGET where that is a BOS (no loss there: paper, appendix G)
    cu_seqlens [k] int32, rising: where sequences and documents begin in the n sequences laid end to end; last: n * T
    sources    [n, T] int16, the source number of each target's document
    sample_ids [n] int64, positions of the sequences in the stored data
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    sources: Tensor
    sample_ids: Tensor

    def split(self, sequences: int) -> list["Batch"]:
        """Cut into batches of `sequences` sequences each, in order; the last may hold fewer."""
        length = self.tokens.shape[1]
        pieces = []
        for begin in range(0, len(self.tokens), sequences):
            end = min(begin + sequences, len(self.tokens))
            inside = (self.cu_seqlens >= begin * length) & (self.cu_seqlens <= end * length)
            pieces.append(
                Batch(
                    tokens=self.tokens[begin:end],
                    targets=self.targets[begin:end],
                    cu_seqlens=self.cu_seqlens[inside] - begin * length,
                    sources=self.sources[begin:end],
                    sample_ids=self.sample_ids[begin:end],
                )
            )
        return pieces

    def piece(self, index: int, pieces: int) -> "Batch":
        """The `index`-th of `pieces` equal runs of tokens of every sequence.

        Targets were shifted before, so the last token of a run has the next run's first one as its target. cu_seqlens
        then names only what begins inside a run: a first token that is not in it continues the run before.
        """
        count, length = self.tokens.shape
        run = length // pieces
        starts = self.cu_seqlens[:-1].long()
        row, position = starts // length, starts % length - index * run
        inside = (position >= 0) & (position < run)
        begins = torch.cat([row[inside] * run + position[inside], torch.tensor([count * run])])
        here = slice(index * run, (index + 1) * run)
        return Batch(
            tokens=self.tokens[:, here].contiguous(),
            targets=self.targets[:, here].contiguous(),
            cu_seqlens=begins.to(self.cu_seqlens.dtype),
            sources=self.sources[:, here].contiguous(),
            sample_ids=self.sample_ids,
        )


def collate(samples: list[Sample], sample_ids: list[int], bos_id: int) -> Batch:
    """Make one batch of stored samples of equal length."""
    stored = np.stack([sample.tokens for sample in samples]).astype(np.int64)
    length = stored.shape[1] - 1
    targets = stored[:, 1:].copy()
    targets[targets == bos_id] = IGNORED_TARGET
    # A document that begins at the very last stored token has no input token here: that token is only a target.
    starts = [
        row * length + sample.document_starts[sample.document_starts < length] for row, sample in enumerate(samples)
    ]
    sources = [np.repeat(sample.sources, np.diff(sample.document_starts, append=length + 1))[1:] for sample in samples]
    return Batch(
        tokens=torch.from_numpy(stored[:, :-1].copy()),
        targets=torch.from_numpy(targets),
        cu_seqlens=torch.from_numpy(np.concatenate([*starts, [len(samples) * length]]).astype(np.int32)),
        sources=torch.from_numpy(np.stack(sources).astype(np.int16)),
        sample_ids=torch.tensor(sample_ids, dtype=torch.int64),
    )
