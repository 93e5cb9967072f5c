"""Linear attention with a scalar forget gate, which GLA and Mamba2 share (paper table 1, section E.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesatron.model.recurrences.chunks import Chunks
from mesatron.model.recurrences.decay import log_decay_after, log_decays, run_decays, weighted_products, weighted_sum
from mesatron.model.recurrences.recurrence import ChunkwiseRecurrence


class LinearInputs(NamedTuple):
    """q, k [B, T, h, D]; v [B, T, h, Dv], with the input gate in it; log_gamma, fp32 [B, T, h]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_gamma: Tensor


class LinearState(NamedTuple):
    """G [N, h, Dv, D], the decayed sum of v k^T."""

    G: Tensor


class MatrixRecurrence(ChunkwiseRecurrence):
    """One whose state is a LinearState."""

    def empty_state(self, inputs: Any, sequences: int) -> LinearState:
        heads, key_size = inputs.k.shape[2:]
        return LinearState(inputs.v.new_zeros(sequences, heads, inputs.v.shape[-1], key_size))


class LinearAttention(MatrixRecurrence):
    """G_t = gamma_t G_(t-1) + v_t k_t^T, o_t = G_t q_t."""

    remakes_summary = False

    def step(self, inputs: LinearInputs, state: LinearState) -> tuple[Tensor, LinearState]:
        q, k, v, log_gamma = inputs
        G = log_gamma.exp()[..., None, None] * state.G + v.unsqueeze(-1) * k.unsqueeze(-2)
        return (G @ q.unsqueeze(-1)).squeeze(-1), LinearState(G)

    def chunkwise(self, inputs: LinearInputs, initial: LinearState, chunks: Chunks) -> tuple[Tensor, LinearState]:
        q, k, v, log_gamma = map(chunks.by_head, inputs)
        decay = log_decays(log_gamma).exp()
        start, weight = decay[..., :1], decay[..., 1:]
        sums = (v * weight[..., -1, :, None]).mT @ k
        whole = start[..., -1:, :]

        def advance(state: LinearState, chunk: int) -> LinearState:
            return LinearState(torch.addcmul(sums[:, :, chunk], whole[:, :, chunk], state.G))

        before, final = chunks.scan(initial, advance, 2)
        o = (q * start) @ before.G.mT + (q @ k.mT * weight) @ v
        return chunks.join_heads(o), final

    def fla(
        self, inputs: LinearInputs, initial: LinearState | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, LinearState | None]:
        from fla.ops.simple_gla import chunk_simple_gla

        from mesatron.model.recurrences.fla_core import bounded, state_of, transposed

        o, G = chunk_simple_gla(
            inputs.q, inputs.k, inputs.v, bounded(inputs.log_gamma), scale=1.0, initial_state=transposed(initial),
            output_final_state=return_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return o, state_of(G)

    def summarize(self, inputs: LinearInputs) -> tuple[Tensor, ...]:
        """The log decay [B, h] and the state [B, h, Dv, D] after it from an empty one."""
        decays, over_run = run_decays(inputs.log_gamma, self.implementation)
        G = weighted_products(inputs.v, inputs.k, decays.exp(), self.implementation)
        return over_run.to(G.dtype), G

    def combine(self, summaries: Sequence[Tensor]) -> LinearState:
        log_decay, G = summaries
        return LinearState(weighted_sum(G, log_decay_after(log_decay, 0)))
