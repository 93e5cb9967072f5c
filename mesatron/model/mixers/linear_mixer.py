"""What linear mixers share (paper sections E.1 and G.2): the path into a recurrence and out of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from mesatron.config import ModelConfig
from mesatron.model.convolution import ShortConvolution
from mesatron.model.linear import Linear
from mesatron.model.norm import RMSNorm
from mesatron.model.recurrences import Recurrence
from mesatron.model.seams import Seams


class LinearMixerState(NamedTuple):
    """What a layer carries from token to token: its recurrence's state, and the convolutions' last inputs."""

    memory: Any
    q_history: Tensor  # [B, convolution_width - 1, width]
    k_history: Tensor


class LinearMixer(nn.Module, ABC):
    """q and k through a short convolution, SiLU and L2 norm; a recurrence; RMSNorm of every head; output projection.

    A mixer is what gates it has and which recurrence they drive.
    """

    after_convolution: Literal["unit", "silu"] = "unit"

    def __init__(self, config: ModelConfig, seams: Seams, settings: Any, implementation: str) -> None:
        """`settings`: the mixer's section of `config`. `implementation`: of convolutions and norm."""
        super().__init__()
        self.config, self.seams = settings, seams
        self.heads, self.head_dim = config.heads, config.head_dim
        inner = config.heads * config.head_dim
        self.q = Linear(config.width, inner)
        self.k = Linear(config.width, inner)
        self.v = Linear(config.width, inner)
        convolution = (inner, settings.convolution_width, config.head_dim, implementation, self.after_convolution)
        self.q_convolution = ShortConvolution(*convolution)
        self.k_convolution = ShortConvolution(*convolution)
        self.norm = RMSNorm((config.heads, config.head_dim), config.norm_epsilon, implementation)
        self.output = Linear(inner, config.width, gain=2.0 / config.layers)
        self.observations: dict[str, Tensor] = {}

    @abstractmethod
    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[Recurrence, Any]:
        """The recurrence and its inputs, from q (which stays as it is), k, v [B, T, heads, head_dim] and the mixer's
        input x [B, T, width]; also notes `observations`."""

    def forward(
        self,
        x: Tensor,
        state: LinearMixerState | None = None,
        cu_seqlens: Tensor | None = None,
        keep_state: bool = False,
    ) -> tuple[Tensor, LinearMixerState | None]:
        """x [B, T, width] to y [B, T, width] and, if it is to be kept, the state after the last token."""
        convolve = self.seams.convolve
        k, q = self.k(x), self.q(x)
        k_lent, q_lent = self.seams.lend((k, q), self.k_convolution.width - 1, cu_seqlens)
        v = self.v(x).unflatten(-1, (self.heads, self.head_dim))
        k, k_history = convolve(self.k_convolution, k, state and state.k_history, cu_seqlens, k_lent)
        recurrence, inputs = self.recurrence(k, k, v, x)
        announced = self.seams.announce(recurrence, inputs, cu_seqlens)
        # Queries leave the state as it is, so they are made while others are told of it; until then k has their place.
        q, q_history = convolve(self.q_convolution, q, state and state.q_history, cu_seqlens, q_lent)
        inputs = inputs._replace(q=q)
        result = self.seams.recur(recurrence, inputs, state and state.memory, cu_seqlens, keep_state, announced)
        self.observations |= result.figures
        y = self.output(self.norm(result.o.to(x.dtype)).flatten(-2))
        if result.state is None:
            return y, None
        # Copies: views keep alive what they were cut from.
        return y, LinearMixerState(result.state, q_history.clone(), k_history.clone())

    def observed(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Of the last forward pass: no scalars; gates as tensors."""
        return {}, self.observations
