"""DeltaNet in the paper's form (table 1): G_t = G_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = G_t q_t."""

from __future__ import annotations

import torch
from torch import Tensor

from mesatron.config import ModelConfig
from mesatron.model.linear import GateProjection
from mesatron.model.mixers.linear_mixer import LinearMixer
from mesatron.model.recurrences import DeltaInputs, DeltaRule
from mesatron.model.seams import Seams


class DeltaNetMixer(LinearMixer):
    """The delta rule with a scalar step size beta."""

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        super().__init__(config, seams, config.deltanet, config.implementation)
        self.beta = GateProjection(config.width, config.heads)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[DeltaRule, DeltaInputs]:
        beta = torch.sigmoid(self.beta(x))
        self.observations = {"beta": beta.detach()}
        return DeltaRule(self.config.implementation, self.config.chunk_size), DeltaInputs(q, k, v, beta)
