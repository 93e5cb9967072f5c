"""The mLSTM of xLSTM (arXiv 2405.04517) in the paper's backbone: the exception among its linear mixers.

Its input gate is an exponential and its normaliser takes the place of the L2 norm of q and k, whose product is scaled
by 1 / sqrt(head_dim).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model.linear import GateProjection, gate_logits
from mesatron.model.mixers.linear_mixer import LinearMixer
from mesatron.model.recurrences import MLSTM, MLSTMInputs
from mesatron.model.seams import Seams


class MLSTMMixer(LinearMixer):
    """Linear attention with a sigmoid forget gate, an exponential input gate and a normaliser."""

    after_convolution = "silu"

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        super().__init__(config, seams, config.mlstm, config.implementation)
        self.forget = GateProjection(config.width, config.heads)
        self.input = GateProjection(config.width, config.heads)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[MLSTM, MLSTMInputs]:
        forget, log_i = gate_logits(x, self.forget, self.input)
        log_gamma = F.logsigmoid(forget)
        self.observations = {"gamma": log_gamma.detach().exp(), "log_i": log_i.detach()}
        recurrence = MLSTM(self.config.implementation, self.config.chunk_size)
        return recurrence, MLSTMInputs(q, k * self.head_dim**-0.5, v, log_gamma, log_i)
