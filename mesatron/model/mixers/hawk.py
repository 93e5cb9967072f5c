"""Hawk's block (arXiv 2402.19427): a convolution and the RG-LRU beside a GELU branch.

    y = W_o (gelu(W_g x) * h),  u = convolution(W_u x),  r = sigmoid(A_r u + b_r),  i = sigmoid(A_i u + b_i),
    a = exp(-8 r softplus(w)),  h_t = a_t h_(t-1) + sqrt(1 - a_t^2) i_t u_t

A_r and A_i are block diagonal. No norm of heads: the block has none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model.convolution import ShortConvolution
from mesatron.model.linear import Linear
from mesatron.model.parameter import make_parameter
from mesatron.model.precision import at_least_fp32
from mesatron.model.recurrences import RGLRU, RGLRUInputs, RGLRUState
from mesatron.model.seams import Seams

DECAY_SCALE = 8.0
DECAY_MEAN, DECAY_STD = -6.0, 0.8
"""Of w at the start: with r = 1, 95 % of all a then lie between 0.91 and 0.996."""


class HawkMixerState(NamedTuple):
    """What a layer carries from token to token: h, and the convolution's last inputs."""

    memory: RGLRUState
    history: Tensor  # [B, convolution_width - 1, channels]


class BlockDiagonal(nn.Module):
    """Gate logits, in fp32: every block of channels [.., blocks, size] through a matrix of its own; weight [blocks,
    size, size], bias [blocks, size]."""

    def __init__(self, blocks: int, size: int) -> None:
        super().__init__()
        self.weight = make_parameter(blocks, size, size, std=size**-0.5)
        self.bias = make_parameter(blocks, size, weight_decay=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, blocks, size] to fp32 logits of that shape."""
        with torch.autocast(x.device.type, enabled=False):
            x, weight, bias = map(at_least_fp32, (x, self.weight, self.bias))
            return torch.einsum("btni,nij->btnj", x, weight) + bias


class HawkMixer(nn.Module):
    """The gated linear recurrence of Hawk."""

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        super().__init__()
        self.config, self.seams = config.hawk, seams
        blocks, size = config.heads * self.config.blocks_per_head, self.config.block_width(config.head_dim)
        channels = blocks * size
        self.branch = Linear(config.width, channels)
        self.input = Linear(config.width, channels)
        self.convolution = ShortConvolution(
            channels, self.config.convolution_width, size, config.implementation, then="nothing"
        )
        self.recurrence_gate = BlockDiagonal(blocks, size)
        self.input_gate = BlockDiagonal(blocks, size)
        self.decay = make_parameter(blocks, size, mean=DECAY_MEAN, std=DECAY_STD, weight_decay=False)
        self.output = Linear(channels, config.width, gain=2.0 / config.layers)
        self.observations: dict[str, Tensor] = {}

    def forward(
        self, x: Tensor, state: HawkMixerState | None = None, cu_seqlens: Tensor | None = None, keep_state: bool = False
    ) -> tuple[Tensor, HawkMixerState | None]:
        """x [B, T, width] to y [B, T, width] and, if it is to be kept, the state after the last token."""
        u = self.input(x)
        (lent,) = self.seams.lend([u], self.convolution.width - 1, cu_seqlens)
        u, history = self.seams.convolve(self.convolution, u, state and state.history, cu_seqlens, lent)
        log_a = -DECAY_SCALE * torch.sigmoid(self.recurrence_gate(u)) * F.softplus(at_least_fp32(self.decay))
        gated = torch.sigmoid(self.input_gate(u)) * at_least_fp32(u)
        self.observations = {"a": log_a.detach().exp()}
        recurrence = RGLRU(self.config.implementation, self.config.chunk_size)
        inputs = RGLRUInputs(gated.flatten(-2), log_a.flatten(-2))
        announced = self.seams.announce(recurrence, inputs, cu_seqlens)
        branch = F.gelu(self.branch(x))
        result = self.seams.recur(recurrence, inputs, state and state.memory, cu_seqlens, keep_state, announced)
        y = self.output(branch * result.o.to(x.dtype))
        if result.state is None:
            return y, None
        return y, HawkMixerState(result.state, history.clone())

    def observed(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Of the last forward pass: no scalars; the decays as a tensor."""
        return {}, self.observations
