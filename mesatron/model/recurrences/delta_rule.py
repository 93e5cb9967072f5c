"""The delta rule with and without a forget gate: Gated DeltaNet and DeltaNet (paper table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.model.precision import at_least_fp32
from mesatron.model.recurrences.chunks import Chunks
from mesatron.model.recurrences.decay import log_decays
from mesatron.model.recurrences.linear_attention import LinearState, MatrixRecurrence


class DeltaInputs(NamedTuple):
    """q, k [B, T, h, D], keys of norm 1; v [B, T, h, Dv]; beta and log_gamma (None: no gate), fp32 [B, T, h]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_gamma: Tensor | None = None


class DeltaRule(MatrixRecurrence):
    """G_t = gamma_t G_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = G_t q_t.

    What a token writes is u_t k_t^T with u_t = beta_t (v_t - gamma_t G_(t-1) k_t). With the decays zeta_(t,s) inside a
    chunk and G before it, G_t = zeta_(t,0) G + sum_(s<=t) zeta_(t,s) u_s k_s^T, so the u of a chunk solve

        u_t + beta_t sum_(s<t) zeta_(t,s) (k_s . k_t) u_s = beta_t (v_t - zeta_(t,0) G k_t),

    a unit lower triangular system. Its solution is affine in G, so it is solved for v and k before G is known.
    """

    def step(self, inputs: DeltaInputs, state: LinearState) -> tuple[Tensor, LinearState]:
        q, k, v, beta, log_gamma = inputs
        decayed = state.G if log_gamma is None else log_gamma.exp()[..., None, None] * state.G
        u = beta.unsqueeze(-1) * (v - (decayed @ k.unsqueeze(-1)).squeeze(-1))
        G = decayed + u.unsqueeze(-1) * k.unsqueeze(-2)
        return (G @ q.unsqueeze(-1)).squeeze(-1), LinearState(G)

    def chunkwise(self, inputs: DeltaInputs, initial: LinearState, chunks: Chunks) -> tuple[Tensor, LinearState]:
        q, k, v, beta = map(chunks.by_head, inputs[:4])
        log_gamma = torch.zeros_like(beta) if inputs.log_gamma is None else chunks.by_head(inputs.log_gamma)
        decay = log_decays(log_gamma).exp()
        start, weight = decay[..., :1], decay[..., 1:]
        beta = beta.unsqueeze(-1)
        system = k @ k.mT * weight * beta
        written, erased = torch.linalg.solve_triangular(
            system, torch.cat([v, k * start], -1) * beta, upper=False, unitriangular=True
        ).split([v.shape[-1], k.shape[-1]], -1)
        remaining = k * weight[..., -1, :, None]
        sums = written.mT @ remaining
        identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        transition = start[..., -1:, :] * identity - erased.mT @ remaining

        def advance(state: LinearState, chunk: int) -> LinearState:
            return LinearState(state.G @ transition[:, :, chunk] + sums[:, :, chunk])

        before, final = chunks.scan(initial, advance, 2)
        u = written - erased @ before.G.mT
        o = (q * start) @ before.G.mT + (q @ k.mT * weight) @ u
        return chunks.join_heads(o), final

    def fla(
        self, inputs: DeltaInputs, initial: LinearState | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, LinearState | None]:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        from mesatron.model.recurrences.fla_core import CONTINUED_DELTA, bounded, refusal, state_of, transposed

        q, k, v, beta, log_gamma = inputs
        if log_gamma is None and initial is not None and refusal(CONTINUED_DELTA, q.dtype, q.device):
            return self._by_chunks(inputs, initial, cu_seqlens, return_state)
        how = {
            "scale": 1.0, "initial_state": transposed(initial), "output_final_state": return_state,
            "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        if log_gamma is None:
            o, G = chunk_delta_rule(q, k, v, beta.to(q.dtype), **how)
        else:
            o, G = chunk_gated_delta_rule(q, k, v, bounded(log_gamma), beta, **how)
        return o, state_of(G)

    def summarize(self, inputs: DeltaInputs) -> tuple[Tensor, ...]:
        """The transition A [B, h, D, D] of a run and the state S [B, h, Dv, D] after it from an empty one: G becomes
        G A + S. They are the states that rows of the identity and of nothing lead to."""
        with torch.autocast(inputs.k.device.type, enabled=False):
            q, k, v, beta = map(at_least_fp32, inputs[:4])
            (batch, length, heads, key_size), value_size = inputs.k.shape, inputs.v.shape[-1]
            identity = torch.eye(key_size, dtype=k.dtype, device=k.device)
            rows = F.pad(identity, (0, 0, value_size, 0)).expand(batch, heads, -1, -1)
            inputs = DeltaInputs(q, k, F.pad(v, (0, key_size)), beta, inputs.log_gamma)
            chunks = Chunks.of(batch, length, self.chunk_size)
            final = self.chunkwise(inputs, LinearState(rows), chunks)[1].G
            return final[:, :, value_size:], final[:, :, :value_size]

    def combine(self, summaries: Sequence[Tensor]) -> LinearState:
        transitions, sums = summaries
        G = sums[:0].sum(0)
        for transition, own in zip(transitions, sums, strict=True):
            G = G @ transition + own
        return LinearState(G)
