"""Perplexity by the paper's definition (section L): exp of the mean negative log-likelihood over all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from mesatron_data.batch import IGNORED_TARGET, Batch
from mesatron_data.manifest import Manifest
from torch import Tensor

from mesatron.metrics import perplexity
from mesatron.parallel.layout import Layout

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""tokens, targets [B, T] and cu_seqlens, as a Batch has them, to the fp32 loss [B, T]."""


@dataclass(frozen=True)
class Perplexity:
    """Mean loss in nats per token, overall, by source and by position, the tokens it was measured on, and the
    fingerprint of the data that they are of.

    Entry k of what is by position is of the k-th token of every sequence, counted from 0; its loss is None where no
    sequence has a scored token.
    """

    loss: float
    tokens: int
    data_fingerprint: str = ""
    loss_by_source: dict[str, float] = field(default_factory=dict)
    tokens_by_source: dict[str, int] = field(default_factory=dict)
    loss_by_position: list[float | None] = field(default_factory=list)
    tokens_by_position: list[int] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)


@torch.no_grad()
def measure(losses: LossFunction, batches: Iterator[Batch], manifest: Manifest, layout: Layout) -> Perplexity:
    """Perplexity of `losses` over the `batches` of all processes; every process gets the same result.

    All processes run the same number of forward passes, since one under ZeRO-3 needs the others: a process that has
    no batch left runs one whose targets are all ignored.
    """
    sources = manifest.sources
    loss_sums = torch.zeros(len(sources), dtype=torch.float64)
    counts = torch.zeros(len(sources), dtype=torch.float64)
    position_loss_sums = torch.zeros(manifest.context_length, dtype=torch.float64)
    position_counts = torch.zeros_like(position_loss_sums)
    batch = next(batches, None)
    while layout.world.max(int(batch is not None)):
        if batch is None:
            losses(*_idle_inputs(manifest.context_length // layout.context.size))
        else:
            batch = layout.piece(batch)
            loss = losses(batch.tokens, batch.targets, batch.cu_seqlens).double().cpu()
            scored = batch.targets != IGNORED_TARGET
            source = batch.sources[scored].long()
            loss_sums.index_add_(0, source, loss[scored])
            counts += torch.bincount(source, minlength=len(sources))
            length = batch.tokens.shape[1]
            begin = layout.context.rank * length
            position_loss_sums[begin : begin + length] += loss.where(scored, 0.0).sum(0)
            position_counts[begin : begin + length] += scored.sum(0)
            batch = next(batches, None)
    tables = loss_sums, counts, position_loss_sums, position_counts
    totals = iter(layout.sum(*torch.cat(tables).tolist()))
    loss_sum, count, position_loss_sum, position_count = ([*islice(totals, len(table))] for table in tables)
    return Perplexity(
        loss=sum(loss_sum) / sum(count),
        tokens=int(sum(count)),
        data_fingerprint=manifest.fingerprint,
        loss_by_source={s: total / n for s, total, n in zip(sources, loss_sum, count, strict=True) if n},
        tokens_by_source={s: int(n) for s, n in zip(sources, count, strict=True) if n},
        loss_by_position=[total / n if n else None for total, n in zip(position_loss_sum, position_count, strict=True)],
        tokens_by_position=[int(n) for n in position_count],
    )


def _idle_inputs(context_length: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.zeros(1, context_length, dtype=torch.int64)
    return tokens, torch.full_like(tokens, IGNORED_TARGET), torch.tensor([0, context_length], dtype=torch.int32)
