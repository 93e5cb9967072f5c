"""How tokens are laid out in chunks, and where sequences begin and end in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Places = Tensor | slice


@dataclass(frozen=True)
class Layout:
    """A chunked view of [batch, length, ...].

    Without documents every row of the batch is one sequence. Documents are handled in one of two ways. Where no state
    goes in or comes out, chunks pay no heed to documents and a document's first token just forgets all before it: no
    padding. Where states are wanted, each document starts a chunk, and chunks are no longer than the mean document
    rounded up to a power of two: padding at most trebles the tokens, and there is at most one more chunk per document.
    """

    batch: int
    chunks: int  # C, per row of the batch
    chunk_size: int  # L
    sequences: int  # S, whose states are kept, per row of the batch
    slot_order: Places  # see chunkwise._scan: [S + C], slots out of the concatenation of sequences and chunks
    start_slots: Places  # [C]
    final_slots: Places  # [S]
    starts: Tensor | None = None  # bool [C, L], first tokens of documents that share chunks
    source: Tensor | None = None  # [C * L], token at each place of the chunks; `length` for padding
    target: Tensor | None = None  # [length], place of each token in the chunks
    length: int = 0

    @staticmethod
    def choose(
        batch: int,
        length: int,
        cu_seqlens: Tensor | None,
        chunk_size: int,
        *,
        with_states: bool,
        device: torch.device,
    ) -> Layout:
        """Layout for [batch, length] tokens, cu_seqlens [N + 1] giving the documents' bounds if there are any."""
        if cu_seqlens is not None and with_states:
            return _layout_of_documents(length, cu_seqlens.cpu().long(), chunk_size, device)
        L = min(chunk_size, length)
        C = -(-length // L)
        starts = None
        if cu_seqlens is not None:
            # An empty document at the end starts at `length`, one place beyond the last token.
            flat = torch.zeros(C * L + 1, dtype=torch.bool, device=device)
            starts = flat.index_fill(0, cu_seqlens.long(), True)[:-1].view(C, L)
        return Layout(batch, C, L, 1, slice(None), slice(0, C), slice(C, None), starts=starts, length=length)

    def spread(self, x: Tensor) -> Tensor:
        """[batch, length, ...] -> [batch, C * L, ...], padded with zeros, which leave every state as it is."""
        places = self.chunks * self.chunk_size
        if self.source is not None:
            return _pad_tokens(x, 1).index_select(1, self.source)
        return x if places == self.length else _pad_tokens(x, places - self.length)

    def gather(self, x: Tensor) -> Tensor:
        """The inverse of spread."""
        return x[:, : self.length] if self.target is None else x.index_select(1, self.target)

    def to_chunks(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[batch, C * L, h, D] -> [batch, h, C, L, D], contiguous."""
        return x.to(dtype).unflatten(1, (self.chunks, self.chunk_size)).permute(0, 3, 1, 2, 4).contiguous()

    def from_chunks(self, x: Tensor, heads: int) -> Tensor:
        """[n, L, D] -> [batch, C * L, h, D], contiguous."""
        x = x.view(self.batch, heads, self.chunks, self.chunk_size, x.shape[-1])
        return x.permute(0, 2, 3, 1, 4).flatten(1, 2)

    def mark_starts(self, forgets: Tensor) -> Tensor:
        """Add the starts of documents to the tokens [batch, h, C, L] that forget everything before them."""
        return forgets if self.starts is None else forgets | self.starts

    def per_sequence(self, states: Tensor) -> Tensor:
        """[batch * S, h, E, D] -> [batch, h, S, E, D]"""
        return states.unflatten(0, (self.batch, self.sequences)).transpose(1, 2)

    def from_sequences(self, states: Tensor) -> Tensor:
        """The inverse of per_sequence."""
        return states.transpose(1, 2).flatten(0, 1)


def _pad_tokens(x: Tensor, count: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, count))


def _layout_of_documents(length: int, bounds: Tensor, chunk_size: int, device: torch.device) -> Layout:
    lengths = bounds.diff()
    documents = len(lengths)
    mean_length = -(-length // max(1, int((lengths > 0).sum())))
    L = min(chunk_size, 1 << (mean_length - 1).bit_length())
    per_document = -(-lengths // L)
    C = int(per_document.sum())
    chunk, document = torch.arange(C), torch.arange(documents)
    owner = document.repeat_interleave(per_document)
    first_chunk = per_document.cumsum(0) - per_document

    position = bounds[owner, None] + ((chunk - first_chunk[owner]) * L)[:, None] + torch.arange(L)
    real = position < bounds[owner + 1, None]
    source = position.where(real, length).flatten()
    target = real.flatten().nonzero().squeeze(1)

    initial_slots = first_chunk + document
    chunk_slots = chunk + owner + 1
    slot_order = torch.cat([initial_slots, chunk_slots]).argsort()
    final_slots = initial_slots + per_document
    places = (slot_order, chunk_slots - 1, final_slots, source, target)
    slot_order, start_slots, final_slots, source, target = (x.to(device) for x in places)
    return Layout(1, C, L, documents, slot_order, start_slots, final_slots, source=source, target=target, length=length)
