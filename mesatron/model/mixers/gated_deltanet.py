"""Gated DeltaNet in the paper's form (table 1): G_t = gamma_t G_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,
o_t = G_t q_t."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model.linear import GateProjection, gate_logits
from mesatron.model.mixers.linear_mixer import LinearMixer
from mesatron.model.recurrences import DeltaInputs, DeltaRule
from mesatron.model.seams import Seams


class GatedDeltaNetMixer(LinearMixer):
    """The delta rule with a scalar step size beta and a scalar forget gate gamma."""

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        super().__init__(config, seams, config.gated_deltanet, config.implementation)
        self.gamma = GateProjection(config.width, config.heads)
        self.beta = GateProjection(config.width, config.heads)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[DeltaRule, DeltaInputs]:
        gamma, beta = gate_logits(x, self.gamma, self.beta)
        log_gamma, beta = F.logsigmoid(gamma), torch.sigmoid(beta)
        self.observations = {"gamma": log_gamma.detach().exp(), "beta": beta.detach()}
        return DeltaRule(self.config.implementation, self.config.chunk_size), DeltaInputs(q, k, v, beta, log_gamma)
