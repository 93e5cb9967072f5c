"""One token of the Mesa operator on a GPU, for generation: one Triton kernel, one program per sequence and head.

A step reads and writes two states in float32 and does little else, so the goal is the copy rate. A program keeps H in
registers through the whole solve. Symmetry lets the product with p sum over rows: threads that hold a column's rows
add them up alone, and only one row of partial sums per warp goes through shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mesatron_kernels.launch import check_inputs
from mesatron_kernels.solver import WORST_START
from mesatron_kernels.state import MesaOutput, MesaState

# Elements of a state that one warp holds, 128 in the registers of each thread: fewer warps exchange less in a solve.
WARP_ELEMENTS = 4096
_WORST_START = tl.constexpr(WORST_START)


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
    """Triton form of `mesatron_kernels.mesa_step`, where the arguments are described.

    Raises ValueError for tensors off the GPU, float64, several dtypes, or heads that the kernel does not hold.
    """
    (B, heads, D), E = q.shape, v.shape[-1]
    check_inputs("mesa_step", q, k, v)
    q, k, v = (x.contiguous() for x in (q, k, v))
    log_gamma, beta, lam, H, G = (x.float().contiguous() for x in (log_gamma, beta, lam, *state))
    new = MesaState(torch.empty_like(H), torch.empty_like(G))
    o = torch.empty_like(v)
    steps = torch.empty(B, heads, dtype=torch.int32, device=q.device)
    residual = torch.empty(B, heads, dtype=torch.float32, device=q.device)
    BLOCK_D, BLOCK_E = (triton.next_power_of_2(size) for size in (D, E))
    step[(B * heads,)](
        q, k, v, log_gamma, beta, lam, H, G, *new, o, steps, residual, heads, max_steps, tolerance,
        D=D, E=E, BLOCK_D=BLOCK_D, BLOCK_E=BLOCK_E,
        num_warps=max(1, BLOCK_D * max(BLOCK_D, BLOCK_E) // WARP_ELEMENTS),
    )  # fmt: skip
    return MesaOutput(o, new, steps, residual)


@triton.jit
def _load_row(pointer, index, width: tl.constexpr, BLOCK: tl.constexpr):
    """Row `index` of [..., width] in float32, 0 beyond the width."""
    columns = tl.arange(0, BLOCK)
    return tl.load(pointer + index * width + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def _product(H, lam, p):
    """(H + Lambda) p."""
    return tl.sum(H * p[:, None], 0) + lam * p


@triton.jit
def _conjugate_gradients(H, lam, b, max_steps, enough):
    """x with (H + Lambda) x = b for b of norm 1 or 0; steps taken; squared norm of the residual.

    What `solver.conjugate_gradient` does, which says why, for one system; `enough` is the squared residual to reach.
    """
    channels = tl.arange(0, H.shape[0])
    diagonal = tl.sum(tl.where(channels[:, None] == channels[None, :], H, 0.0), 0) + lam
    x = b / diagonal
    r = b - _product(H, lam, x)
    rr = tl.sum(r * r, 0)
    if rr > _WORST_START * _WORST_START:
        x = tl.zeros_like(b)
        r = b
        rr = 1.0
    p = r
    taken = 0
    while (taken < max_steps) & (rr > enough):
        Ap = _product(H, lam, p)
        pAp = tl.sum(p * Ap, 0)
        alpha = tl.where(pAp > 0, rr / pAp, 0.0)
        x += alpha * p
        r -= alpha * Ap
        new_rr = tl.sum(r * r, 0)
        p = r + (new_rr / rr) * p
        rr = new_rr
        taken += 1
    return x, taken, rr


@triton.jit(do_not_specialize=["max_steps"])
def step(
    q,  # [B, heads, D]
    k,  # [B, heads, D]
    v,  # [B, heads, E]
    log_gamma,  # [B, heads] float32
    beta,  # [B, heads] float32
    lam,  # [heads, D] float32
    H,  # [B, heads, D, D] float32
    G,  # [B, heads, E, D] float32
    new_H,  # [B, heads, D, D] float32, written
    new_G,  # [B, heads, E, D] float32, written
    o,  # [B, heads, E], written
    steps,  # [B, heads] int32, written
    residual,  # [B, heads] float32, written
    heads,
    max_steps,
    tolerance,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Both states, the solve and the output for one sequence and head."""
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(0) % heads
    columns, values = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    gamma, weight = tl.exp(tl.load(log_gamma + index)), tl.load(beta + index)
    key = _load_row(k, index, D, BLOCK_D)

    begin, at = index * (D * D), columns[:, None] * D + columns[None, :]
    inside = (columns < D)[:, None] & (columns < D)[None, :]
    # In this order, and not as the compiler would fuse it, H stays exactly symmetric.
    outer = key[:, None] * key[None, :]
    state = gamma * tl.load(H + begin + at, mask=inside, other=0.0)
    state = tl.fma(tl.full([BLOCK_D, BLOCK_D], 1.0, tl.float32) * weight, outer, state)
    tl.store(new_H + begin + at, state, mask=inside)

    b = _load_row(q, index, D, BLOCK_D)
    largest = tl.max(tl.abs(b), 0)
    b /= tl.where(largest > 0, largest, 1.0)
    norm = tl.sqrt(tl.sum(b * b, 0))
    b /= tl.where(norm > 0, norm, 1.0)
    regular = tl.load(lam + head * D + columns, mask=columns < D, other=1.0)
    x, taken, rr = _conjugate_gradients(state, regular, b, max_steps, tolerance * tolerance)
    tl.store(steps + index, taken)
    tl.store(residual + index, tl.sqrt(rr))

    begin, at = index * (E * D), values[:, None] * D + columns[None, :]
    inside = (values < E)[:, None] & (columns < D)[None, :]
    value = weight * _load_row(v, index, E, BLOCK_E)
    state = gamma * tl.load(G + begin + at, mask=inside, other=0.0) + value[:, None] * key[None, :]
    tl.store(new_G + begin + at, state, mask=inside)
    result = tl.sum(state * (x * (largest * norm))[None, :], 1)
    tl.store(o + index * E + values, result, mask=values < E)
