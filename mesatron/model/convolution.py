"""The short causal convolution on the mixer's input path."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mesatron.model.parameter import make_parameter


class ShortConvolution(nn.Module):
    """Causal depthwise convolution y_t = sum_j w_j x_(t-j), j = 0 .. width-1, no bias; weight [channels, width]."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = make_parameter(channels, width, std=width**-0.5)

    def forward(
        self, x: Tensor, history: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve x [B, T, C], seeing `history` [B, width-1, C] (zeros if None) before its first token.

        Returns y [B, T, C] and the history for the tokens that follow. With `cu_seqlens` [N+1] (then B is 1) no
        document sees the one before it.
        """
        length = x.shape[1]
        if history is None:
            history = x.new_zeros(x.shape[0], self.width - 1, x.shape[2])
        padded = torch.cat([history, x], dim=1)
        position = None if cu_seqlens is None else positions_in_documents(cu_seqlens, length)
        y = x * self.weight[:, 0]
        for lag in range(1, self.width):
            lagged = padded[:, self.width - 1 - lag : self.width - 1 - lag + length]
            if position is not None:
                lagged = lagged * (position >= lag)[:, None]
            y = y + lagged * self.weight[:, lag]
        return y, padded[:, length:]


def positions_in_documents(cu_seqlens: Tensor, length: int) -> Tensor:
    """Position [length] of every token inside its document, whose starts are `cu_seqlens` [N+1]."""
    tokens = torch.arange(length, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    return tokens - cu_seqlens[document]
