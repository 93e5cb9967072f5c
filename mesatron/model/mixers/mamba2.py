"""Mamba2 in the paper's form (table 1, section E.1): G_t = gamma_t G_(t-1) + v_t k_t^T, o_t = G_t q_t.

Section G.2 calls it non-gated once; table 1 and section E.1 agree on the forget gate.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model.linear import GateProjection
from mesatron.model.mixers.linear_mixer import LinearMixer
from mesatron.model.recurrences import LinearAttention, LinearInputs
from mesatron.model.seams import Seams


class Mamba2Mixer(LinearMixer):
    """Linear attention with a scalar forget gate alone."""

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        super().__init__(config, seams, config.mamba2, config.implementation)
        self.gamma = GateProjection(config.width, config.heads)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[LinearAttention, LinearInputs]:
        log_gamma = F.logsigmoid(self.gamma(x))
        self.observations = {"gamma": log_gamma.detach().exp()}
        recurrence = LinearAttention(self.config.implementation, self.config.chunk_size)
        return recurrence, LinearInputs(q, k, v, log_gamma)
