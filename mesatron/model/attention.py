"""Causal softmax attention with rotary positions, over all earlier keys or a window of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.model.precision import at_least_fp32

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries, and keys, that FlexAttention skips or takes together."""
FLEX_COMPILATIONS = 64
"""In one process; more are an error."""


@dataclass(frozen=True)
class Attention:
    """Heads whose queries see their own key and those before it, at most `window` in all if there is one.

    implementation: reference (the softmax written out, float64), torch (scaled_dot_product_attention, with a mask of
    all pairs unless keys are all earlier ones, or blocks of a window) or flex (FlexAttention in place of both).
    """

    window: int | None = None
    rope_base: float = 10_000.0
    implementation: str = "torch"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
        """q [B, T, h, D], the queries of the last T of S tokens with k, v [B, S, h, D], to [B, T, h, D].

        segments int [B, S] numbers the documents, rising; they do not see each other. Rotations depend on differences
        of places only, so places are counted from the first key.
        """
        places = torch.arange(k.shape[1], device=k.device)
        q = rotate(q, places[-q.shape[1] :], self.rope_base)
        k = rotate(k, places, self.rope_base)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        T, S = q.shape[2], k.shape[2]
        all_earlier = segments is None and T == S and (self.window is None or self.window >= T)
        if self.implementation == "reference":
            o = _written_out(q.double(), k.double(), v.double(), _visible(q, k, self.window, segments)).to(v.dtype)
        elif all_earlier:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.implementation == "flex" and T > 1:
            mask = block_mask(*seen_keys(q, k, self.window, segments), S)
            o = _flex_attention(q.device.type)(q, k, v, block_mask=mask)
        elif self.window is not None and self.window < T:
            o = _by_windows(q, k, v, self.window, segments)
        else:
            o = F.scaled_dot_product_attention(q, k, v, _visible(q, k, self.window, segments))
        return o.transpose(1, 2)


def rotate(x: Tensor, places: Tensor, base: float) -> Tensor:
    """RoPE (arXiv 2104.09864) of x [B, T, h, D] at `places` [T]: channels i and i + D / 2 turn by place base^(-2i/D).
    A last channel that is odd stays."""
    half = x.shape[-1] // 2
    speeds = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / max(half, 1))
    angles = (places.double()[:, None] * speeds)[:, None]
    cos, sin = (y.to(at_least_fp32(x).dtype) for y in (angles.cos(), angles.sin()))
    first, second, rest = at_least_fp32(x).split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


def _visible(q: Tensor, k: Tensor, window: int | None, segments: Tensor | None) -> Tensor:
    """bool [B or 1, 1, T, S]: the keys that each query sees."""
    S = k.shape[2]
    key = torch.arange(S, device=k.device)
    query = key[S - q.shape[2] :, None]
    seen = (key <= query)[None]
    if window is not None:
        seen = seen & (query - key < window)
    if segments is not None:
        seen = seen & (segments[:, S - q.shape[2] :, None] == segments[:, None])
    return seen.unsqueeze(1)


def _written_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def flex_refusal(head_dim: int, device: torch.device) -> str | None:
    """Why FlexAttention cannot be used, if it cannot."""
    if device.type != "cuda":
        return "no GPU"
    if head_dim % 16:
        return f"FlexAttention has heads of multiples of 16, not {head_dim}"
    try:
        import triton  # noqa: F401
    except Exception as error:
        return f"Triton cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
    return None


@functools.cache
def _flex_attention(device_type: str) -> Callable[..., Tensor]:
    """Compiled, once for the process; on a CPU as torch writes it out, which has no backward pass."""
    from torch.nn.attention.flex_attention import flex_attention

    if device_type != "cuda":
        return flex_attention
    compiled = torch.compile(flex_attention, fullgraph=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        # It is compiled for every dtype, head size and way of differentiating, more often than torch's limit of 8.
        with torch._dynamo.config.patch(recompile_limit=FLEX_COMPILATIONS):
            return compiled(q, k, v, block_mask=block_mask)

    return attend


def seen_keys(q: Tensor, k: Tensor, window: int | None, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """The first and the last key, int32 [B, T], that each query sees of q [B, h, T, D] and k [B, h, S, D]: it sees
    those between them too."""
    (B, _, T, _), S = q.shape, k.shape[2]
    last = torch.arange(S - T, S, dtype=torch.int32, device=k.device).repeat(B, 1)
    first = torch.zeros_like(last)
    if segments is not None:
        first = torch.searchsorted(segments.contiguous(), segments[:, S - T :].contiguous(), out_int32=True)
    if window is not None:
        first = first.maximum(last - window + 1)
    return first, last


def block_mask(first: Tensor, last: Tensor, S: int) -> BlockMask:
    """The mask of queries that see keys `first` to `last` of S, int32 [B, T] and rising, without one of all pairs.

    Only what is captured as a tensor may differ from call to call: FlexAttention is compiled again for other numbers.
    """
    from torch.nn.attention.flex_attention import BlockMask

    T = first.shape[1]
    after = -T % BLOCK
    first_of, last_of = (
        F.pad(x, (0, after), value=nowhere).unflatten(1, (-1, BLOCK)) for x, nowhere in ((first, S), (last, -1))
    )
    begin = torch.arange(0, S, BLOCK, device=first.device)
    end = begin + BLOCK - 1
    # bool [B, blocks of queries, blocks of keys]. A block that is not full of queries or keys is never whole.
    seen = (first_of.amin(-1, keepdim=True) <= end) & (last_of.amax(-1, keepdim=True) >= begin)
    whole = (first_of.amax(-1, keepdim=True) <= begin) & (last_of.amin(-1, keepdim=True) >= end)

    def visible(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first[b, query] <= key) & (key <= last[b, query])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(T, S)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys there are for each of queries, int32 [B, 1, n], and which, in front [B, 1, n, m]."""
    which = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), which.unsqueeze(1)


def _by_windows(q: Tensor, k: Tensor, v: Tensor, window: int, segments: Tensor | None) -> Tensor:
    """Blocks of `window` queries [B, h, T, D], each with the 2 window - 1 keys that it may see: linear in T."""
    (B, _, T, _), S = q.shape, k.shape[2]
    blocks = -(-T // window)
    # So that keys begin window - 1 places before the first query and end with the last block.
    before, after = window - 1 - (S - T), blocks * window - T
    q = F.pad(q, (0, 0, 0, after)).unflatten(2, (blocks, window))
    k, v = (F.pad(x, (0, 0, before, after)).unfold(2, 2 * window - 1, window).movedim(-1, -2) for x in (k, v))
    if segments is None:
        segments = torch.zeros(1, S, dtype=torch.int64, device=q.device)
    own = F.pad(segments[:, S - T :], (0, after), value=-1).unflatten(1, (blocks, window))
    theirs = F.pad(segments, (before, after), value=-1).unfold(1, 2 * window - 1, window)
    lag = torch.arange(window, device=q.device)[:, None] + window - 1 - torch.arange(2 * window - 1, device=q.device)
    seen = ((lag >= 0) & (lag < window)) & (own.unsqueeze(-1) == theirs.unsqueeze(-2))
    # [B, h, blocks, ...] with the blocks in the batch, since masks are alike for all heads of one.
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    seen = seen.expand(B, -1, -1, -1).flatten(0, 1).unsqueeze(1)
    o = F.scaled_dot_product_attention(q, k, v, seen)
    return o.unflatten(0, (B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]
