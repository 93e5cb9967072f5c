"""The mixers' input path: a short causal convolution, and for queries and keys SiLU and heads of norm 1."""

from __future__ import annotations

from typing import Literal

import torch
from mesatron_kernels.documents import documents_of, sent
from torch import Tensor, nn
from torch.nn import functional as F

from mesatron.model import fused
from mesatron.model.parameter import make_parameter


class ShortConvolution(nn.Module):
    """y_t = sum_j w_j x_(t-j), j = 0 .. width-1, channel by channel, cut into heads of `head_dim` channels.

    weight [channels, width], no bias. `then`: heads of silu(y) brought to norm 1, heads of silu(y), or of y itself. The
    gradient of x that a pass gives is a tensor of its own, which context parallelism adds to.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        head_dim: int,
        implementation: str = "auto",
        then: Literal["unit", "silu", "nothing"] = "unit",
    ) -> None:
        super().__init__()
        self.width, self.head_dim = width, head_dim
        self.implementation, self.then = implementation, then
        self.weight = make_parameter(channels, width, std=width**-0.5)

    def forward(
        self, x: Tensor, history: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, channels], with `history` [B, width-1, channels] (zeros if None) before its first token.

        Returns heads [B, T, channels / head_dim, head_dim] and the history for the tokens that follow. With
        `cu_seqlens` [N+1] (then B is 1) no document sees the one before it.
        """
        position = None if cu_seqlens is None else positions_in_documents(cu_seqlens, x.shape[1])
        if self.then == "unit":
            y = fused.unit_heads(x, self.weight, position, history, self.head_dim, self.implementation)
        else:
            y = fused.convolve(x, self.weight, position, history).unflatten(-1, (-1, self.head_dim))
            y = F.silu(y) if self.then == "silu" else y
        return y, self._history_after(x, history)

    def _history_after(self, x: Tensor, history: Tensor | None) -> Tensor:
        if history is None:
            history = x.new_zeros(x.shape[0], self.width - 1, x.shape[2])
        seen = torch.cat([history, x[:, max(0, x.shape[1] - self.width + 1) :]], dim=1)
        return seen[:, seen.shape[1] - self.width + 1 :]


def positions_in_documents(cu_seqlens: Tensor, length: int) -> Tensor:
    """Position [length] of every token inside its document, whose starts are `cu_seqlens` [N+1]."""

    def make(bounds: Tensor) -> Tensor:
        tokens = torch.arange(length)
        return sent(tokens - bounds[torch.searchsorted(bounds, tokens, right=True) - 1], cu_seqlens.device)

    return documents_of(cu_seqlens).made(("positions", length), make)
