"""The Mesa layer (paper sections 2, E, G.2, G.5): o_t = G_t (H_t + Lambda)^-1 q_t per head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mesatron.config import MesaRLSConfig, ModelConfig
from mesatron.model.linear import GateProjection, gate_logits
from mesatron.model.mixers.linear_mixer import LinearMixer
from mesatron.model.parameter import make_parameter
from mesatron.model.precision import at_least_fp32
from mesatron.model.recurrences import Mesa, MesaInputs
from mesatron.model.seams import Seams


class MesaMixer(LinearMixer):
    """The paper's parametrisation around the Mesa operator."""

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        super().__init__(config, seams, config.mesa, config.mesa.implementation)
        self.gamma = GateProjection(config.width, config.heads)
        self.beta = GateProjection(config.width, config.heads)
        self.theta = lambda_parameter(config, self.config)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[Mesa, MesaInputs]:
        log_gamma, beta, lam = self._gates(x)
        self.observations = {"gamma": log_gamma.detach().exp(), "beta": beta.detach(), "lambda": lam.detach()}
        return Mesa(lam, **solver(self.config)), MesaInputs(q, k, v, log_gamma, beta)

    def observed(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Of the last forward pass: mean solver steps and largest residual; gamma, beta and Lambda as tensors."""
        seen = self.observations
        return solver_figures(seen), {name: seen[name] for name in ("gamma", "beta", "lambda")}

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 log gamma [B, T, heads], beta [B, T, heads] and Lambda [heads, head_dim].

        gamma = sigmoid(z) (1 - (1 - cap) beta^2): the cap keeps H bounded over runs of one token (section G.5). Its
        logarithm is formed directly, since gammas near 1 differ by less than fp32 resolves in the product.
        """
        gamma, beta = gate_logits(x, self.gamma, self.beta)
        beta = torch.sigmoid(beta)
        log_gamma = F.logsigmoid(gamma) + torch.log1p(-(1 - self.config.gamma_cap) * beta.square())
        return log_gamma, beta, lambda_of(self.theta, self.config)


def lambda_parameter(config: ModelConfig, settings: MesaRLSConfig) -> nn.Parameter:
    """theta [heads, head_dim], for which softplus(theta) is the first Lambda less its bound."""
    above = settings.lambda_initial - settings.lambda_lower_bound
    return make_parameter(
        config.heads, config.head_dim, mean=above + math.log(-math.expm1(-above)), weight_decay=False
    )  # fmt: skip


def lambda_of(theta: Tensor, settings: MesaRLSConfig) -> Tensor:
    """fp32 Lambda [heads, head_dim]."""
    return settings.lambda_lower_bound + F.softplus(at_least_fp32(theta))


def solver(settings: MesaRLSConfig) -> dict:
    """The arguments of a Mesa recurrence besides Lambda."""
    return {
        "max_steps": settings.solver_steps,
        "tolerance": settings.solver_tolerance,
        "chunk_size": settings.chunk_size,
        "implementation": settings.implementation,
    }


def solver_figures(observations: dict[str, Tensor]) -> dict[str, float]:
    """Mean solver steps and, where the solver tells it, the largest residual."""
    figures = {"solver/steps": float(observations["solver/steps"].float().mean())}
    if "solver/residual" in observations:
        figures["solver/residual"] = float(observations["solver/residual"].max())
    return figures
