"""The Mesa layer (paper sections 2, E, G.2, G.5): o_t = G_t (H_t + Lambda)^-1 q_t per head."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from mesatron_kernels import MesaState, mesa_step
from torch import Tensor, nn
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model.convolution import ShortConvolution
from mesatron.model.linear import GateProjection, Linear
from mesatron.model.norm import RMSNorm
from mesatron.model.parameter import make_parameter
from mesatron.model.precision import at_least_fp32
from mesatron.model.seams import Seams


class MesaMixerState(NamedTuple):
    """What a layer carries from token to token: the sums H and G, and the convolutions' last inputs."""

    memory: MesaState
    q_history: Tensor  # [B, convolution_width - 1, width]
    k_history: Tensor


class MesaMixer(nn.Module):
    """The paper's parametrisation around the Mesa operator."""

    def __init__(self, config: ModelConfig, seams: Seams) -> None:
        super().__init__()
        self.config, self.seams = config.mesa, seams
        self.heads, self.head_dim = config.heads, config.head_dim
        inner = config.heads * config.head_dim
        self.q = Linear(config.width, inner)
        self.k = Linear(config.width, inner)
        self.v = Linear(config.width, inner)
        self.gamma = GateProjection(config.width, config.heads)
        self.beta = GateProjection(config.width, config.heads)
        width, implementation = self.config.convolution_width, config.implementation
        self.q_convolution = ShortConvolution(inner, width, config.head_dim, implementation)
        self.k_convolution = ShortConvolution(inner, width, config.head_dim, implementation)
        # softplus(theta) = lambda_initial - bound
        above = self.config.lambda_initial - self.config.lambda_lower_bound
        theta = above + math.log(-math.expm1(-above))
        self.theta = make_parameter(config.heads, config.head_dim, mean=theta, weight_decay=False)
        self.norm = RMSNorm((config.heads, config.head_dim), config.norm_epsilon, implementation)
        self.output = Linear(inner, config.width, gain=2.0 / config.layers)
        self.observations: dict[str, Tensor] = {}

    def forward(
        self,
        x: Tensor,
        state: MesaMixerState | None = None,
        cu_seqlens: Tensor | None = None,
        keep_state: bool = False,
    ) -> tuple[Tensor, MesaMixerState | None]:
        """x [B, T, width] to y [B, T, width] and, if it is to be kept, the state after the last token."""
        convolve = self.seams.convolve
        q, q_history = convolve(self.q_convolution, self.q(x), state and state.q_history, cu_seqlens)
        k, k_history = convolve(self.k_convolution, self.k(x), state and state.k_history, cu_seqlens)
        v = self.v(x).unflatten(-1, (self.heads, self.head_dim))
        log_gamma, beta, lam = self._gates(x)
        if state is not None and x.shape[1] == 1:
            result = mesa_step(
                q[:, 0], k[:, 0], v[:, 0], log_gamma[:, 0], beta[:, 0], lam, state.memory, **self._solver()
            )  # fmt: skip
            o = result.o[:, None]
        else:
            result = self.seams.mesa(
                q, k, v, log_gamma, beta, lam, initial_state=state and state.memory, cu_seqlens=cu_seqlens,
                chunk_size=self.config.chunk_size, return_state=keep_state, **self._solver(),
            )  # fmt: skip
            o = result.o
        self.observations = {
            "solver/steps": result.steps, "solver/residual": result.residual,
            "gamma": log_gamma.detach().exp(), "beta": beta.detach(), "lambda": lam.detach(),
        }  # fmt: skip
        y = self.output(self.norm(o.to(x.dtype)).flatten(-2))
        if result.state is None:
            return y, None
        # Copies: views keep alive what they were cut from.
        return y, MesaMixerState(result.state, q_history.clone(), k_history.clone())

    def observed(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Of the last forward pass: mean solver steps and largest residual; gamma, beta and Lambda as tensors."""
        seen = self.observations
        scalars = {
            "solver/steps": float(seen["solver/steps"].float().mean()),
            "solver/residual": float(seen["solver/residual"].max()),
        }
        return scalars, {name: seen[name] for name in ("gamma", "beta", "lambda")}

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 log gamma [B, T, heads], beta [B, T, heads] and Lambda [heads, head_dim].

        gamma = sigmoid(z) (1 - (1 - cap) beta^2): the cap keeps H bounded over runs of one token (section G.5). Its
        logarithm is formed directly, since gammas near 1 differ by less than fp32 resolves in the product.
        """
        x = at_least_fp32(x)  # once for both
        beta = torch.sigmoid(self.beta(x))
        log_gamma = F.logsigmoid(self.gamma(x)) + torch.log1p(-(1 - self.config.gamma_cap) * beta.square())
        lam = self.config.lambda_lower_bound + F.softplus(at_least_fp32(self.theta))
        return log_gamma, beta, lam

    def _solver(self) -> dict:
        return {
            "max_steps": self.config.solver_steps,
            "tolerance": self.config.solver_tolerance,
            "implementation": self.config.implementation,
        }
