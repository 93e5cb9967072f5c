"""Softmax attention with RoPE over all earlier tokens: the Transformer of the comparison (paper section E.1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mesatron.config import AttentionConfig, ModelConfig
from mesatron.model.attention import Attention
from mesatron.model.linear import Linear
from mesatron.model.seams import Seams


class KeyValueCache(NamedTuple):
    """Keys, before their rotation, and values of earlier tokens [B, S, heads, head_dim]."""

    k: Tensor
    v: Tensor


class TransformerMixer(nn.Module):
    """Multi-head attention. Its state grows with the text, unless there is a `window`."""

    def __init__(self, config: ModelConfig, seams: Seams, window: int | None = None) -> None:
        super().__init__()
        self.seams = seams
        self.heads, self.head_dim = config.heads, config.head_dim
        settings: AttentionConfig = config.swa if window else config.transformer
        self.attention = Attention(window, settings.rope_base, settings.implementation)
        inner = config.heads * config.head_dim
        self.q = Linear(config.width, inner)
        self.k = Linear(config.width, inner)
        self.v = Linear(config.width, inner)
        self.output = Linear(inner, config.width, gain=2.0 / config.layers)

    def forward(
        self, x: Tensor, state: KeyValueCache | None = None, cu_seqlens: Tensor | None = None, keep_state: bool = False
    ) -> tuple[Tensor, KeyValueCache | None]:
        """x [B, T, width] to y [B, T, width] and, if it is to be kept, the keys and values that later tokens see."""
        q, k, v = (part(x).unflatten(-1, (self.heads, self.head_dim)) for part in (self.q, self.k, self.v))
        if state is not None:
            k, v = torch.cat([state.k, k], 1), torch.cat([state.v, v], 1)
        y = self.output(self.seams.attend(self.attention, q, k, v, cu_seqlens).flatten(-2))
        if not keep_state:
            return y, None
        unseen = 0 if self.attention.window is None else max(0, k.shape[1] - self.attention.window + 1)
        return y, KeyValueCache(k[:, unseen:].clone(), v[:, unseen:].clone())

    def observed(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Nothing: attention has no gates."""
        return {}, {}
