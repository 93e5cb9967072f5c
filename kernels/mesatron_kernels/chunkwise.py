"""The Mesa operator in torch, parallel over the whole sequence (paper section 2 and appendices C, D).

The sequence is cut into chunks of L tokens. States exist only at chunk starts; within a chunk a token sees earlier ones
through an L x L matrix of decays, so that no D x D matrix is ever held per token. Letters in shapes: B batch, h heads,
C chunks, L tokens of a chunk, n = B * h * C rows, D key size, Dv value size, E = D + Dv: both states are sums of w
k^T with w = [k, v], so one set of products serves both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mesatron_kernels.layout import Layout
from mesatron_kernels.solver import DenseOperator, conjugate_gradient
from mesatron_kernels.state import MesaOutput, MesaState

# exp of this is 0 in float64 too, so such a gate forgets everything and has no gradient; in a sum of logarithms, -inf
# or -1e30 would swallow its neighbours.
FORGETS_ALL = -800.0
# Chunk states are combined by matrices of at most this many chunks, which keeps that work linear in the sequence.
SCAN_BLOCK = 64


def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor,
    beta: Tensor,
    lam: Tensor,
    *,
    initial_state: MesaState | None,
    cu_seqlens: Tensor | None,
    max_steps: int,
    tolerance: float,
    chunk_size: int,
    return_state: bool,
) -> MesaOutput:
    """Chunkwise form of `mesatron_kernels.mesa`, where the arguments are described."""
    (batch, length, heads, key_size), value_size = q.shape, v.shape[-1]
    with_states = initial_state is not None or return_state
    layout = Layout.choose(batch, length, cu_seqlens, chunk_size, with_states=with_states, device=q.device)
    dtype = compute_dtype(q)
    if initial_state is None:
        sequences = layout.batch * layout.sequences
        initial_state = MesaState(
            q.new_zeros(sequences, heads, key_size, key_size, dtype=dtype),
            q.new_zeros(sequences, heads, value_size, key_size, dtype=dtype),
        )
    tokens = (layout.spread(x) for x in (q, k, v, log_gamma, beta))
    o, H, G, steps, residual = _Mesa.apply(*tokens, lam, *initial_state, layout, max_steps, tolerance)
    state = MesaState(H, G) if return_state else None
    return MesaOutput(layout.gather(o), state, layout.gather(steps), layout.gather(residual))


def mesa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor,
    beta: Tensor,
    lam: Tensor,
    state: MesaState,
    *,
    max_steps: int,
    tolerance: float,
) -> MesaOutput:
    """One token of `mesatron_kernels.mesa_step`: the recurrence, then conjugate gradients on H itself."""
    dtype = compute_dtype(q)
    with full_precision(q.device):
        q_, k_, v_ = (x.to(dtype) for x in (q, k, v))
        gamma = log_gamma.to(dtype).exp()[..., None, None]
        beta_k = (beta.to(dtype)[..., None] * k_).unsqueeze(-2)
        H = torch.addcmul(gamma * state.H.to(dtype), k_.unsqueeze(-1), beta_k)
        G = torch.addcmul(gamma * state.G.to(dtype), v_.unsqueeze(-1), beta_k)
        operator = DenseOperator(H.flatten(0, 1), lam.to(dtype).expand_as(q_).flatten(0, 1).unsqueeze(1))
        solution = conjugate_gradient(operator, q_.flatten(0, 1).unsqueeze(1), max_steps=max_steps, tolerance=tolerance)
        o = torch.matmul(G, solution.x.view_as(q_).unsqueeze(-1)).squeeze(-1)
    shape = q.shape[:2]
    return MesaOutput(o.to(v.dtype), MesaState(H, G), solution.steps.view(shape), solution.residual.view(shape))


def compute_dtype(q: Tensor) -> torch.dtype:
    """float64 stays, everything else is computed in float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """float32 products in full float32: no autocast, no TF32 (10 bits make H + Lambda indefinite for hard heads)."""
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def decay_matrix(log_decay: Tensor, reset: Tensor, dtype: torch.dtype) -> Tensor:
    """zeta: [..., m] -> [..., m, m] with entry (t, i) = product of the decays of i+1..t, 0 for i > t or across a reset.

    Sums are taken in float64, for an exponent is the small difference of two large ones; it never exceeds 0.
    """
    total = log_decay.double().cumsum(-1)
    segment = reset.cumsum(-1, dtype=torch.int32)
    exponent = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(dtype)
    linked = (segment.unsqueeze(-1) == segment.unsqueeze(-2)).tril()
    return exponent.masked_fill(~linked, float("-inf")).exp()


@dataclass(frozen=True)
class Chunks:
    """Everything a token sees, by chunk: sums over i <= t of zeta_(t,i) beta_i w_i k_i^T, never formed.

    k [n, L, D]; w [n, L, E]; weight [n, L, L] = zeta beta; start [n, L, 1], the decay since the chunk's start; states
    [n, E, D] = [H; G] there.
    """

    k: Tensor
    w: Tensor
    weight: Tensor
    start: Tensor
    states: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """[H_t; G_t] x_t for every token: x [n, L, D] -> [n, L, E]."""
        attention = torch.bmm(x, self.k.mT) * self.weight
        return torch.baddbmm(torch.bmm(x, self.states.mT) * self.start, attention, self.w)

    def apply_G(self, x: Tensor) -> Tensor:
        """G_t x_t for every token: x [n, L, D] -> [n, L, Dv]."""
        D = self.k.shape[-1]
        attention = torch.bmm(x, self.k.mT) * self.weight
        return torch.baddbmm(torch.bmm(x, self.states[:, D:].mT) * self.start, attention, self.w[..., D:])

    def apply_G_transposed(self, e: Tensor) -> Tensor:
        """G_t^T e_t for every token: e [n, L, Dv] -> [n, L, D]."""
        D = self.k.shape[-1]
        attention = torch.bmm(e, self.w[..., D:].mT) * self.weight
        return torch.baddbmm(torch.bmm(e, self.states[:, D:]) * self.start, attention, self.k)

    def system(self, lam: Tensor) -> GramOperator:
        """H_t + Lambda for every token; lam [n, 1, D]."""
        return GramOperator(self.k, self.weight, self.start, self.states[:, : self.k.shape[-1]], lam)


class GramOperator:
    """H_t + Lambda of every token of n chunks, see Operator and Chunks."""

    def __init__(self, k: Tensor, weight: Tensor, start: Tensor, H: Tensor, lam: Tensor) -> None:
        self.k, self.weight, self.start, self.H, self.lam = k, weight, start, H, lam
        self.attention = torch.empty_like(weight)

    def apply(self, p: Tensor, out: Tensor) -> Tensor:
        attention = torch.bmm(p, self.k.mT, out=self.attention).mul_(self.weight)
        return torch.bmm(p, self.H, out=out).mul_(self.start).addcmul_(p, self.lam).baddbmm_(attention, self.k)

    def diagonal(self) -> Tensor:
        at_start = self.H.diagonal(dim1=1, dim2=2).unsqueeze(1)
        return torch.baddbmm(torch.addcmul(self.lam, self.start, at_start), self.weight, self.k.square())

    def rows(self, index: Tensor) -> GramOperator:
        return GramOperator(*(x[index] for x in (self.k, self.weight, self.start, self.H, self.lam)))


def build(
    k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, H: Tensor, G: Tensor, layout: Layout, dtype: torch.dtype
) -> tuple[Chunks, Tensor]:
    """Chunks from the inputs in token layout, and the final states [N, h, E, D] of all sequences. Differentiable."""
    keys = layout.to_chunks(k, dtype)
    w = torch.cat([keys, layout.to_chunks(v, dtype)], -1)
    gates = layout.to_chunks(log_gamma.unsqueeze(-1), log_gamma.dtype).squeeze(-1)
    forgets = gates < FORGETS_ALL
    log_decay = gates.masked_fill(forgets, 0.0)
    reset = layout.mark_starts(forgets)
    # One more position before the first token stands for the chunk's start.
    zeta = decay_matrix(F.pad(log_decay, (1, 0)), F.pad(reset, (1, 0)), dtype)
    weight = zeta[..., 1:, 1:] * layout.to_chunks(beta.unsqueeze(-1), dtype).mT
    start = zeta[..., 1:, :1]
    sums = torch.matmul((w * weight[..., -1, :, None]).mT, keys)

    initial = layout.per_sequence(torch.cat([H, G], -2).to(dtype))
    states, final = _scan(sums, log_decay.double().sum(-1), reset.any(-1), initial, layout)
    return Chunks(*(x.flatten(0, 2) for x in (keys, w, weight, start, states))), layout.from_sequences(final)


def _scan(sums: Tensor, log_decay: Tensor, reset: Tensor, initial: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Pass states from chunk to chunk.

    sums [B, h, C, E, D], log_decay and reset [B, h, C], initial [B, h, S, E, D] -> states at chunk starts [B, h, C,
    E, D] and final states [B, h, S, E, D]. A sequence takes one slot for its initial state and one for the state
    after each chunk.
    """
    shape = initial.shape[:3]
    slots = torch.cat([initial, sums], 2)[:, :, layout.slot_order].flatten(3)
    decays = torch.cat([log_decay.new_zeros(shape), log_decay], 2)[:, :, layout.slot_order]
    resets = torch.cat([reset.new_ones(shape), reset], 2)[:, :, layout.slot_order]
    blocks: list[Tensor] = []
    for block, decay, forgets in zip(*(x.split(SCAN_BLOCK, 2) for x in (slots, decays, resets)), strict=True):
        zeta = decay_matrix(F.pad(decay, (1, 0)), F.pad(forgets, (1, 0)), block.dtype)
        states = torch.matmul(zeta[..., 1:, 1:], block)
        blocks.append(states + zeta[..., 1:, :1] * blocks[-1][:, :, -1:] if blocks else states)
    # Joining a single block would copy it.
    after = (torch.cat(blocks, 2) if len(blocks) > 1 else blocks[0]).unflatten(3, initial.shape[3:])
    return after[:, :, layout.start_slots], after[:, :, layout.final_slots]


def _row_lam(lam: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """[h, D] -> [n, 1, D]"""
    heads, key_size = lam.shape
    rows = lam.to(dtype)[None, :, None].expand(layout.batch, heads, layout.chunks, key_size)
    return rows.reshape(-1, 1, key_size)


class _Mesa(torch.autograd.Function):
    """o_t = G_t (H_t + Lambda)^-1 q_t; the backward takes the solve as exact (implicit differentiation, appendix D)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gamma: Tensor,
        beta: Tensor,
        lam: Tensor,
        H: Tensor,
        G: Tensor,
        layout: Layout,
        max_steps: int,
        tolerance: float,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.solve = layout, {"max_steps": max_steps, "tolerance": tolerance}
        dtype, heads, D = compute_dtype(q), q.shape[2], k.shape[-1]
        with full_precision(q.device):
            chunks, final = build(k, v, log_gamma, beta, H, G, layout, dtype)
            rhs = layout.to_chunks(q, dtype).flatten(0, 2)
            solution = conjugate_gradient(chunks.system(_row_lam(lam, layout, dtype)), rhs, **ctx.solve)
            o = chunks.apply_G(solution.x)
        ctx.save_for_backward(k, v, log_gamma, beta, lam, H, G, solution.x)
        ctx.q_dtype = q.dtype
        steps = layout.from_chunks(solution.steps, heads).squeeze(-1)
        residual = layout.from_chunks(solution.residual, heads).squeeze(-1)
        ctx.mark_non_differentiable(steps, residual)
        final_H, final_G = final[..., :D, :].contiguous(), final[..., D:, :].contiguous()
        return layout.from_chunks(o.to(v.dtype), heads), final_H, final_G, steps, residual

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dH: Tensor | None, dG: Tensor | None, *_: None) -> tuple[Any, ...]:
        """With e = dL/do, e* = (H + Lambda)^-1 G^T e and q*, all three held constant, every gradient is that of

            sum_t e_t G_t q*_t - e*_t H_t q*_t + e*_t q_t - e*_t Lambda q*_t + <dL/dH_T, H_T> + <dL/dG_T, G_T>,

        in which H_t and G_t are sums that automatic differentiation handles, gates and initial states included.
        """
        *inputs, q_star = ctx.saved_tensors
        layout: Layout = ctx.layout
        dtype = q_star.dtype
        lam = inputs.pop(4)
        leaves = k, v, log_gamma, beta, H, G = [x.detach().requires_grad_() for x in inputs]
        dq = dlam = None
        with full_precision(q_star.device):
            with torch.enable_grad():
                chunks, final = build(k, v, log_gamma, beta, H, G, layout, dtype)
                outputs, cotangents = [], []
                if do is not None:
                    outputs.append(chunks.apply(q_star))
                if dH is not None or dG is not None:
                    outputs.append(final)
            if do is not None:
                e = layout.to_chunks(do, dtype).flatten(0, 2)
                system = chunks.system(_row_lam(lam, layout, dtype))
                e_star = conjugate_gradient(system, chunks.apply_G_transposed(e), **ctx.solve).x
                cotangents.append(torch.cat([-e_star, e], -1))
                dq = layout.from_chunks(e_star.to(ctx.q_dtype), lam.shape[0])
                per_row = -torch.linalg.vecdot(e_star, q_star, dim=1)
                dlam = per_row.view(layout.batch, lam.shape[0], -1, lam.shape[1]).sum((0, 2)).to(lam.dtype)
            if dH is not None or dG is not None:
                D = lam.shape[-1]
                dfinal = torch.zeros_like(final)
                if dH is not None:
                    dfinal[..., :D, :] = dH
                if dG is not None:
                    dfinal[..., D:, :] = dG
                cotangents.append(dfinal)
            grads = torch.autograd.grad(outputs, leaves, cotangents) if outputs else [None] * len(leaves)
        return dq, *grads[:4], dlam, *grads[4:], None, None, None
