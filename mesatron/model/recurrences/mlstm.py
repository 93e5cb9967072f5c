"""The mLSTM of xLSTM (arXiv 2405.04517): linear attention with exponential input gates and a normaliser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.model.recurrences.chunks import Chunks
from mesatron.model.recurrences.decay import log_decay_after, log_decays, run_decays, weighted_products, weighted_sum
from mesatron.model.recurrences.recurrence import ChunkwiseRecurrence

LEAST_LOG_FLOOR = -60.0


class MLSTMInputs(NamedTuple):
    """q, k [B, T, h, D]; v [B, T, h, Dv]; log_gamma and log_i of forget and input gate, fp32 [B, T, h]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_gamma: Tensor
    log_i: Tensor


class MLSTMState(NamedTuple):
    """exp(-m) times [G; z]: G in the first Dv rows of `memory` [N, h, Dv + 1, D], the normaliser z in the last, and m
    [N, h], which has no gradient: only exp(m) memory has a meaning."""

    memory: Tensor
    m: Tensor


class MLSTM(ChunkwiseRecurrence):
    """G_t = f_t G_(t-1) + i_t v_t k_t^T, z_t = f_t z_(t-1) + i_t k_t, o_t = G_t q_t / max(1, |z_t . q_t|).

    i is an exponential, so all is kept times exp(-m) with m_t = max(m_(t-1) + log f_t, log i_t, 0). The output does not
    depend on m. It is never below 0: beside a denominator of at least 1, terms that exp(0) does not scale up do not
    overflow, and those that vanish are nothing.
    """

    def empty_state(self, inputs: MLSTMInputs, sequences: int) -> MLSTMState:
        heads, key_size = inputs.k.shape[2:]
        memory = inputs.v.new_zeros(sequences, heads, inputs.v.shape[-1] + 1, key_size)
        return MLSTMState(memory, memory.new_zeros(sequences, heads))

    def step(self, inputs: MLSTMInputs, state: MLSTMState) -> tuple[Tensor, MLSTMState]:
        q, k, v, log_gamma, log_i = inputs
        kept = log_gamma + state.m.detach()
        m = torch.maximum(kept, log_i).clamp(min=0.0).detach()
        kept, added = (x[..., None, None] for x in ((kept - m).exp(), (log_i - m).exp()))
        memory = kept * state.memory + added * _extended(v).unsqueeze(-1) * k.unsqueeze(-2)
        return _normalised((memory @ q.unsqueeze(-1)).squeeze(-1), m), MLSTMState(memory, m)

    def chunkwise(self, inputs: MLSTMInputs, initial: MLSTMState, chunks: Chunks) -> tuple[Tensor, MLSTMState]:
        q, k, v, log_gamma = map(chunks.by_head, inputs[:4])
        log_i = chunks.by_head(inputs.log_i, float("-inf"))
        w = _extended(v)
        exponents = log_decays(log_gamma)
        start, own = exponents[..., 0], exponents[..., 1:] + log_i.unsqueeze(-2)
        whole = start[..., -1]
        m_own = own[..., -1, :].amax(-1).clamp(min=0.0).detach()
        sums = (w * (own[..., -1, :] - m_own.unsqueeze(-1)).exp().unsqueeze(-1)).mT @ k

        def advance(state: MLSTMState, chunk: int) -> MLSTMState:
            kept, m_new = whole[:, :, chunk] + state.m.detach(), m_own[:, :, chunk]
            m = torch.maximum(kept, m_new).detach()
            kept, added = (x.exp()[..., None, None] for x in (kept - m, m_new - m))
            return MLSTMState(kept * state.memory + added * sums[:, :, chunk], m)

        before, final = chunks.scan(initial, advance, 2)
        start = start + before.m.detach().unsqueeze(-1)
        m = torch.maximum(start, own.amax(-1)).clamp(min=0.0).detach()
        earlier = (q @ before.memory.mT) * (start - m).exp().unsqueeze(-1)
        o = _normalised(earlier + (q @ k.mT * (own - m.unsqueeze(-1)).exp()) @ w, m)
        return chunks.join_heads(o), final

    def summarize(self, inputs: MLSTMInputs) -> tuple[Tensor, ...]:
        """The log decay [B, h], and m [B, h] and memory [B, h, Dv + 1, D] after the run from an empty state."""
        decays, over_run = run_decays(inputs.log_gamma, self.implementation)
        exponents = decays + inputs.log_i
        m = exponents.amax(1).clamp(min=0.0).detach()
        weights = (exponents - m.unsqueeze(1)).exp()
        memory = weighted_products(_extended(inputs.v), inputs.k, weights, self.implementation)
        return over_run.to(memory.dtype), m.to(memory.dtype), memory

    def combine(self, summaries: Sequence[Tensor]) -> MLSTMState:
        log_decay, m_own, memory = summaries
        exponents = log_decay_after(log_decay, 0) + m_own.detach()
        m = torch.cat([exponents.new_zeros(1, *exponents.shape[1:]), exponents]).amax(0).detach()
        return MLSTMState(weighted_sum(memory, exponents - m), m.to(memory.dtype))


def _extended(v: Tensor) -> Tensor:
    """[v, 1]"""
    return F.pad(v, (0, 1), value=1.0)


def _normalised(o: Tensor, m: Tensor) -> Tensor:
    # A floor that vanished would divide 0 by 0 where q is 0, as in the padding of chunks.
    floor = (-m).clamp(min=LEAST_LOG_FLOOR).exp().unsqueeze(-1)
    return o[..., :-1] / torch.maximum(o[..., -1:].abs(), floor)
