"""The Mesa operator behind the interface of a recurrence, and the same layer by recursive least squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from mesatron_kernels import MesaState, mesa, mesa_step
from torch import Tensor

from mesatron.model.precision import at_least_fp32
from mesatron.model.recurrences.decay import log_decay_after, run_decays, weighted_products, weighted_sum
from mesatron.model.recurrences.recurrence import Output, Recurrence


class MesaInputs(NamedTuple):
    """q, k [B, T, h, D]; v [B, T, h, Dv]; log_gamma and beta, fp32 [B, T, h]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_gamma: Tensor
    beta: Tensor


@dataclass(frozen=True)
class Mesa(Recurrence):
    """`mesatron_kernels.mesa` with Lambda `lam` [h, D]; figures are the solver's steps and residuals.

    implementation: one of that operator's, or fla, fla-core's `chunk_mesa_net`, a peer to compare with. It takes
    `max_steps` steps always and tells no residual, computes in fp16 inside, and loses gradients where those of o are
    small: relative to float64 3e-3 at a scale of 1, up to a quarter at 1e-4, all of dq and of Lambda's at 1e-6. One
    token with states goes by the operator's step, which means the same.
    """

    remakes_summary = False
    lam: Tensor
    max_steps: int
    tolerance: float
    chunk_size: int
    implementation: str

    def __call__(
        self,
        inputs: MesaInputs,
        initial_state: MesaState | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> Output:
        how: dict[str, Any] = {
            "max_steps": self.max_steps,
            "tolerance": self.tolerance,
            "implementation": "auto" if self.implementation == "fla" else self.implementation,
        }
        if initial_state is not None and inputs.q.shape[1] == 1 and return_state and cu_seqlens is None:
            q, k, v, log_gamma, beta = (x[:, 0] for x in inputs)
            token = mesa_step(q, k, v, log_gamma, beta, self.lam, initial_state, **how)
            o, steps, residual = (x[:, None] for x in (token.o, token.steps, token.residual))
            return Output(o, token.state, _figures(steps, residual))
        if self.implementation == "fla":
            return self._by_fla(inputs, initial_state, cu_seqlens, return_state)
        result = mesa(
            *inputs, self.lam, initial_state=initial_state, cu_seqlens=cu_seqlens, chunk_size=self.chunk_size,
            return_state=return_state, **how,
        )  # fmt: skip
        return Output(result.o, result.state, _figures(result.steps, result.residual))

    def _by_fla(
        self, inputs: MesaInputs, initial_state: MesaState | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> Output:
        from fla.ops.mesa_net import chunk_mesa_net

        from mesatron.model.recurrences.fla_core import bounded

        # Its G is [N, h, D, Dv], so transposed; H is symmetric.
        H, G = (None, None) if initial_state is None else (initial_state.H, initial_state.G.mT)
        o, H, G = chunk_mesa_net(
            inputs.q, inputs.k, inputs.v, bounded(inputs.log_gamma), inputs.beta, self.lam, h_kk_init=H, h_kv_init=G,
            output_final_state=return_state, max_CG_iteration=self.max_steps, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        steps = torch.full(o.shape[:3], self.max_steps, dtype=torch.int32, device=o.device)
        return Output(o, MesaState(H, G.mT) if return_state else None, {"solver/steps": steps})

    def summarize(self, inputs: MesaInputs) -> tuple[Tensor, ...]:
        """The state [H; G] [B, h, D + Dv, D] after a run from an empty one, and the log decay [B, h] over it."""
        decays, over_run = run_decays(inputs.log_gamma, self.implementation)
        weights = decays.exp() * inputs.beta
        states = weighted_products(inputs.v, inputs.k, weights, self.implementation, squares=True)
        return states, over_run.to(states.dtype)

    def combine(self, summaries: Sequence[Tensor]) -> MesaState:
        states, log_decays = summaries
        return MesaState(*weighted_sum(states, log_decay_after(log_decays, 0)).split(states.shape[-1], -2))


def _figures(steps: Tensor, residual: Tensor) -> dict[str, Tensor]:
    return {"solver/steps": steps, "solver/residual": residual}


class MesaRLS(Mesa):
    """The Mesa layer without a forget gate; its reference is the recursion of the original layer.

    By Sherman and Morrison, R_t = (H_t + Lambda)^-1 follows from R_(t-1) without a solve:

        R_t = R_(t-1) - beta_t R_(t-1) k_t k_t^T R_(t-1) / (1 + beta_t k_t^T R_(t-1) k_t),  R_0 = Lambda^-1,

    but one token after the other. The other implementations are those of Mesa, with gamma = 1.
    """

    def __call__(
        self,
        inputs: MesaInputs,
        initial_state: MesaState | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> Output:
        if self.implementation != "reference":
            return super().__call__(inputs, initial_state, cu_seqlens, return_state)
        q, k, v, log_gamma, beta = (x.double() for x in inputs)
        (batch, length, heads, key_size), dtype = q.shape, at_least_fp32(inputs.q).dtype
        bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
        if initial_state is None:
            sequences = batch * (len(bounds) - 1)
            initial_state = MesaState(
                q.new_zeros(sequences, heads, key_size, key_size), q.new_zeros(sequences, heads, v.shape[-1], key_size)
            )
        lam = torch.diag_embed(self.lam.double())
        outputs, states = [], []
        for number, (begin, end) in enumerate(pairwise(bounds)):
            H, G = (x.double().split(batch)[number] for x in initial_state)
            R = torch.linalg.inv(H + lam)
            for t in range(begin, end):
                forgets = log_gamma[:, t, :, None, None] < 0
                H, G = H.masked_fill(forgets, 0.0), G.masked_fill(forgets, 0.0)
                R = torch.where(forgets, torch.linalg.inv(lam), R)
                key, scaled = k[:, t].unsqueeze(-1), (beta[:, t, :, None] * k[:, t]).unsqueeze(-2)
                Rk = R @ key
                R = R - Rk @ (scaled @ R) / (1 + scaled @ Rk)
                H, G = H + key @ scaled, G + v[:, t].unsqueeze(-1) @ scaled
                outputs.append((G @ (R @ q[:, t].unsqueeze(-1))).squeeze(-1))
            states.append(MesaState(H, G))
        final = MesaState(*(torch.cat(parts).to(dtype) for parts in zip(*states, strict=True)))
        zeros = q.new_zeros(q.shape[:3])
        o = torch.stack(outputs, 1).to(inputs.v.dtype)
        return Output(o, final if return_state else None, _figures(zeros.int(), zeros))
