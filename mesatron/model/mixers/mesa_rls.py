"""The original Mesa layer (arXiv 2309.05858; paper section 4.8): recursive least squares, without a forget gate."""

from __future__ import annotations

import torch
from torch import Tensor

from mesatron.config import ModelConfig
from mesatron.model.linear import GateProjection
from mesatron.model.mixers.linear_mixer import LinearMixer
from mesatron.model.mixers.mesa import lambda_of, lambda_parameter, solver, solver_figures
from mesatron.model.recurrences import MesaInputs, MesaRLS
from mesatron.model.seams import Seams


class MesaRLSMixer(LinearMixer):
    """A Mesa layer that never forgets: one gate, beta."""

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        super().__init__(config, seams, config.mesa_rls, config.mesa_rls.implementation)
        self.beta = GateProjection(config.width, config.heads)
        self.theta = lambda_parameter(config, self.config)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[MesaRLS, MesaInputs]:
        beta, lam = torch.sigmoid(self.beta(x)), lambda_of(self.theta, self.config)
        self.observations = {"beta": beta.detach(), "lambda": lam.detach()}
        return MesaRLS(lam, **solver(self.config)), MesaInputs(q, k, v, torch.zeros_like(beta), beta)

    def observed(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Of the last forward pass: mean solver steps and largest residual; beta and Lambda as tensors."""
        return solver_figures(self.observations), {name: self.observations[name] for name in ("beta", "lambda")}
