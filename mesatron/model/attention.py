"""Causal softmax attention with rotary positions, over all earlier keys or a window of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.model.precision import at_least_fp32


@dataclass(frozen=True)
class Attention:
    """Heads whose queries see their own key and those before it, at most `window` in all if there is one.

    implementation: reference (the softmax written out, float64) or torch (scaled_dot_product_attention).
    """

    window: int | None = None
    rope_base: float = 10_000.0
    implementation: str = "torch"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None) -> Tensor:
        """q [B, T, h, D], the queries of the last T of S tokens with k, v [B, S, h, D], to [B, T, h, D].

        segments int [B, S] numbers the documents, which do not see each other. Rotations depend on differences of
        places only, so places are counted from the first key.
        """
        places = torch.arange(k.shape[1], device=k.device)
        q = rotate(q, places[-q.shape[1] :], self.rope_base)
        k = rotate(k, places, self.rope_base)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.implementation == "reference":
            o = _written_out(q.double(), k.double(), v.double(), _visible(q, k, self.window, segments)).to(v.dtype)
        elif self.window is not None and q.shape[2] > self.window:
            o = _by_windows(q, k, v, self.window, segments)
        elif segments is None and q.shape[2] == k.shape[2]:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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
