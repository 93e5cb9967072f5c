"""Perplexity by the paper's definition (section L): exp of the mean negative log-likelihood over all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
    """Mean loss in nats per token, overall and by source, and the tokens it was measured on."""

    loss: float
    tokens: int
    loss_by_source: dict[str, float] = field(default_factory=dict)
    tokens_by_source: dict[str, int] = field(default_factory=dict)

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
            batch = next(batches, None)
    totals = layout.sum(*loss_sums.tolist(), *counts.tolist())
    loss_sum, count = totals[: len(sources)], totals[len(sources) :]
    return Perplexity(
        loss=sum(loss_sum) / sum(count),
        tokens=int(sum(count)),
        loss_by_source={s: total / n for s, total, n in zip(sources, loss_sum, count, strict=True) if n},
        tokens_by_source={s: int(n) for s, n in zip(sources, count, strict=True) if n},
    )


def _idle_inputs(context_length: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.zeros(1, context_length, dtype=torch.int64)
    return tokens, torch.full_like(tokens, IGNORED_TARGET), torch.tensor([0, context_length], dtype=torch.int32)
