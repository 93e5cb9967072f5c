"""GLA in the paper's form (table 1, section E.1): G_t = gamma_t G_(t-1) + beta_t v_t k_t^T, o_t = G_t q_t."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model.linear import GateProjection, gate_logits
from mesatron.model.mixers.linear_mixer import LinearMixer
from mesatron.model.precision import at_least_fp32
from mesatron.model.recurrences import LinearAttention, LinearInputs
from mesatron.model.seams import Seams


class GLAMixer(LinearMixer):
    """Linear attention with a scalar forget gate and a scalar input gate, which goes into the values."""

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        super().__init__(config, seams, config.gla, config.implementation)
        self.gamma = GateProjection(config.width, config.heads)
        self.beta = GateProjection(config.width, config.heads)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[LinearAttention, LinearInputs]:
        gamma, beta = gate_logits(x, self.gamma, self.beta)
        log_gamma, beta = F.logsigmoid(gamma), torch.sigmoid(beta)
        self.observations = {"gamma": log_gamma.detach().exp(), "beta": beta.detach()}
        gated = (at_least_fp32(v) * beta.unsqueeze(-1)).to(v.dtype)
        recurrence = LinearAttention(self.config.implementation, self.config.chunk_size)
        return recurrence, LinearInputs(q, k, gated, log_gamma)
