"""How tokens are laid out in chunks, and how states pass from chunk to chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Chunks:
    """[batch, length, ...] cut into chunks of `size` tokens; a sequence begins with a chunk and fills up its last.

    ends: for every sequence in a row, the number of the chunk after its last one. source [chunks * size]: the token at
    each place, `length` for padding, and target [length]: the place of each token, where documents are packed.
    """

    batch: int
    length: int
    size: int
    ends: list[int]
    source: Tensor | None = None
    target: Tensor | None = None

    @staticmethod
    def of(batch: int, length: int, size: int, cu_seqlens: Tensor | None = None) -> Chunks:
        """Chunks of at most `size` tokens; of packed documents no longer than their mean length, rounded up to a power
        of two, so that padding at most trebles the tokens."""
        if cu_seqlens is None:
            size = min(size, length)
            return Chunks(batch, length, size, [-(-length // size)])
        bounds = cu_seqlens.cpu().long()
        lengths = bounds.diff()
        mean = -(-length // int((lengths > 0).sum()))
        size = min(size, 1 << (mean - 1).bit_length())
        per_document = -(-lengths // size)
        ends = per_document.cumsum(0)
        owner = torch.arange(len(lengths)).repeat_interleave(per_document)
        within = torch.arange(len(owner)) - (ends - per_document)[owner]
        places = (bounds[owner] + within * size)[:, None] + torch.arange(size)
        real = places < bounds[owner + 1, None]
        source, target = places.where(real, length).flatten(), real.flatten().nonzero().squeeze(1)
        return Chunks(batch, length, size, ends.tolist(), source.to(cu_seqlens.device), target.to(cu_seqlens.device))

    def cut(self, x: Tensor, filling: float = 0.0) -> Tensor:
        """[batch, length, ...] to [batch, chunks, size, ...]."""
        padding = 1 if self.source is not None else self.ends[-1] * self.size - self.length
        padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, padding), value=filling)
        if self.source is not None:
            padded = padded.index_select(1, self.source)
        return padded.unflatten(1, (self.ends[-1], self.size))

    def by_head(self, x: Tensor, filling: float = 0.0) -> Tensor:
        """[batch, length, h, ...] to [batch, h, chunks, size, ...]."""
        return self.cut(x, filling).movedim(3, 1)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `cut`."""
        x = x.flatten(1, 2)
        return x[:, : self.length] if self.target is None else x.index_select(1, self.target)

    def join_heads(self, x: Tensor) -> Tensor:
        """The inverse of `by_head`."""
        return self.join(x.movedim(1, 3))

    def scan(self, initial: Any, advance: Callable[[Any, int], Any], dimension: int) -> tuple[Any, Any]:
        """States before all chunks, stacked along `dimension`, and after every sequence.

        initial: NamedTuple of tensors [sequences, ...]. advance(state, chunk) is the state after that chunk.
        """
        kind, before, after = type(initial), [], []
        chunk = 0
        for state, end in zip(zip(*(x.split(self.batch) for x in initial), strict=True), self.ends, strict=True):
            while chunk < end:
                before.append(state)
                state = advance(kind(*state), chunk)
                chunk += 1
            after.append(state)
        stacked = kind(*(torch.stack(parts, dimension) for parts in zip(*before, strict=True)))
        return stacked, kind(*(torch.cat(parts) for parts in zip(*after, strict=True)))
