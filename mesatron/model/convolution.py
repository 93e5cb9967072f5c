"""The mixer's input path for queries and keys: a short causal convolution, SiLU, and heads of norm 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mesatron.model import fused
from mesatron.model.parameter import make_parameter


class ShortConvolution(nn.Module):
    """Heads of silu(y) brought to norm 1, where y_t = sum_j w_j x_(t-j), j = 0 .. width-1, channel by channel.

    weight [channels, width], no bias; a head is `head_dim` channels.
    """

    def __init__(self, channels: int, width: int, head_dim: int, implementation: str = "auto") -> None:
        super().__init__()
        self.width, self.head_dim = width, head_dim
        self.implementation = implementation
        self.weight = make_parameter(channels, width, std=width**-0.5)

    def forward(
        self, x: Tensor, history: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, channels], with `history` [B, width-1, channels] (zeros if None) before its first token.

        Returns heads [B, T, channels / head_dim, head_dim] and the history for the tokens that follow. With
        `cu_seqlens` [N+1] (then B is 1) no document sees the one before it.
        """
        position = None if cu_seqlens is None else positions_in_documents(cu_seqlens, x.shape[1])
        y = fused.unit_heads(x, self.weight, position, history, self.head_dim, self.implementation)
        return y, self._history_after(x, history)

    def _history_after(self, x: Tensor, history: Tensor | None) -> Tensor:
        if history is None:
            history = x.new_zeros(x.shape[0], self.width - 1, x.shape[2])
        seen = torch.cat([history, x[:, max(0, x.shape[1] - self.width + 1) :]], dim=1)
        return seen[:, seen.shape[1] - self.width + 1 :]


def positions_in_documents(cu_seqlens: Tensor, length: int) -> Tensor:
    """Position [length] of every token inside its document, whose starts are `cu_seqlens` [N+1]."""
    tokens = torch.arange(length, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    return tokens - cu_seqlens[document]
