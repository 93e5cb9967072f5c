"""The RG-LRU, the recurrence of Hawk (arXiv 2402.19427): one gated linear unit a channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mesatron.model.precision import at_least_fp32
from mesatron.model.recurrences.chunks import Chunks
from mesatron.model.recurrences.decay import log_decay_after, weighted_sum
from mesatron.model.recurrences.recurrence import ChunkwiseRecurrence

LEAST_INPUT = 1e-6
"""1 - a^2 counts as no less, which bounds the gradient of its root."""


class RGLRUInputs(NamedTuple):
    """x [B, T, C], with the input gate in it; log_gamma, the logarithm of a, fp32 [B, T, C]."""

    x: Tensor
    log_gamma: Tensor


class RGLRUState(NamedTuple):
    """h [N, C]."""

    h: Tensor


class RGLRU(ChunkwiseRecurrence):
    """h_t = a_t h_(t-1) + sqrt(1 - a_t^2) x_t, which is also the output. At a sequence's first token a is 0."""

    marks_starts = True

    def empty_state(self, inputs: RGLRUInputs, sequences: int) -> RGLRUState:
        return RGLRUState(inputs.x.new_zeros(sequences, inputs.x.shape[-1]))

    def step(self, inputs: RGLRUInputs, state: RGLRUState) -> tuple[Tensor, RGLRUState]:
        h = inputs.log_gamma.exp() * state.h + _scaled(inputs)
        return h, RGLRUState(h)

    def chunkwise(self, inputs: RGLRUInputs, initial: RGLRUState, chunks: Chunks) -> tuple[Tensor, RGLRUState]:
        x, log_a = chunks.cut(_scaled(inputs)), chunks.cut(inputs.log_gamma)
        own = _Scan.apply(log_a.exp(), x)
        decay = log_a.cumsum(2).exp()

        def advance(state: RGLRUState, chunk: int) -> RGLRUState:
            return RGLRUState(torch.addcmul(own[:, chunk, -1], decay[:, chunk, -1], state.h))

        before, final = chunks.scan(initial, advance, 1)
        return chunks.join(torch.addcmul(own, decay, before.h.unsqueeze(2))), final

    def fla(
        self, inputs: RGLRUInputs, initial: RGLRUState | None, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, RGLRUState | None]:
        from fla.ops.hgrn import fused_recurrent_hgrn

        from mesatron.model.recurrences.fla_core import bounded

        x, log_a = _scaled(RGLRUInputs(*map(at_least_fp32, inputs))), bounded(at_least_fp32(inputs.log_gamma))
        h, last = fused_recurrent_hgrn(x, log_a, None if initial is None else initial.h, return_state, cu_seqlens)
        return h, None if last is None else RGLRUState(last)

    def summarize(self, inputs: RGLRUInputs) -> tuple[Tensor, ...]:
        """The log decay [B, C] and the state [B, C] after the run from an empty one."""
        x = _scaled(RGLRUInputs(*map(at_least_fp32, inputs)))
        h = (x * log_decay_after(inputs.log_gamma, 1).exp().to(x.dtype)).sum(1)
        return inputs.log_gamma.double().sum(1).to(x.dtype), h

    def combine(self, summaries: Sequence[Tensor]) -> RGLRUState:
        log_decay, h = summaries
        return RGLRUState(weighted_sum(h, log_decay_after(log_decay, 0)))


def _scaled(inputs: RGLRUInputs) -> Tensor:
    return inputs.x * (-torch.expm1(2 * inputs.log_gamma)).clamp(min=LEAST_INPUT).sqrt()


class _Scan(torch.autograd.Function):
    """h_t = a_t h_(t-1) + x_t along dimension 2 of [B, C, L, W], from 0, in log2(L) passes over all tokens."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        h = _scan(a, x)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor]:
        a, h = ctx.saved_tensors
        following = torch.cat([a[:, :, 1:], torch.zeros_like(a[:, :, :1])], 2)
        dx = _scan(following.flip(2), dh.flip(2)).flip(2)
        before = torch.cat([torch.zeros_like(h[:, :, :1]), h[:, :, :-1]], 2)
        return dx * before, dx


def _scan(a: Tensor, x: Tensor) -> Tensor:
    """Each pass joins every token's run with the run of equal length to its left; products of a never exceed 1."""
    length, reach = x.shape[2], 1
    while reach < length:
        x = torch.cat([x[:, :, :reach], torch.addcmul(x[:, :, reach:], a[:, :, reach:], x[:, :, :-reach])], 2)
        a = torch.cat([a[:, :, :reach], a[:, :, reach:] * a[:, :, :-reach]], 2)
        reach *= 2
    return x
