"""Triton kernels for the gradients of keys, values and gates, chunk by chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from mesatron_kernels.triton_tiles import (
    FORGETS_ALL,
    input_product,
    is_half,
    load_chunk,
    load_gates,
    load_rows,
    load_sizes,
    load_state,
    product,
    scaled_rows,
    store_rows,
    tile_product,
    two_terms,
)


@triton.jit
def backward_inputs(
    k, v,  # [N, heads, D or E]; k as products take it: solve_backward's copy of bf16
    beta, summed,  # [N, heads] float32
    q_high, q_low, q_size,  # q*, by solve_forward
    e_high, e_low, e_size,  # e*, by solve_backward
    e,  # [N, heads, E]
    dH_high, dH_low, dH_scale,  # [c, heads, D, D]: minus twice the cotangent of H after the chunk
    dG_high, dG_low, dG_scale,  # [c, heads, E, D]: cotangent of G after the chunk
    hard,  # [c, heads] int32
    dk, dv,  # [N, heads, D or E], written; dk may lie where e_low does
    dbeta,  # [N, heads] float32, written
    chunks, length, per_sequence,  # see load_chunk
    heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of k, v and beta for one chunk of one head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, valid = load_chunk(chunks, chunk, length, per_sequence, L)
    is_hard = tl.load(hard + chunk.to(tl.int64) * heads + head)
    for HARD in tl.static_range(2 if is_half(PRECISION) else 1):  # 32 bits have no low terms
        if is_hard == HARD or not is_half(PRECISION):
            _backward_inputs(
                k, v, beta, summed, q_high, q_low, q_size, e_high, e_low, e_size, e, dH_high, dH_low, dH_scale,
                dG_high, dG_low, dG_scale, dk, dv, dbeta, chunk, head, tokens, valid, heads,
                D, E, BLOCK_D, BLOCK_E, L, HARD, PRECISION,
            )  # fmt: skip


@triton.jit
def _backward_inputs(
    k, v, beta, summed, q_high, q_low, q_size, e_high, e_low, e_size, e, dH_high, dH_low, dH_scale,
    dG_high, dG_low, dG_scale, dk, dv, dbeta, chunk, head, tokens, valid, heads,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, L: tl.constexpr,
    HARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Matrices over (s, t) are formed in that order from the start: a transposed product is what Triton 3.4 to 3.7.0
    miscompile on Hopper.
    """
    columns, values = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    gate, to_token = load_gates(beta, summed, tokens, valid, head, heads)
    last = tl.max(tl.where(valid, tokens, 0), 0)
    total = tl.load(summed + last * heads + head)
    to_end = tl.exp(total - to_token)
    keys = load_rows(k, tokens, valid, head, heads, columns, D)
    seen = load_rows(v, tokens, valid, head, heads, values, E)

    # What comes from after the chunk, by the cotangents of the states at its end.
    index = chunk.to(tl.int64) * heads + head
    rows, power = scaled_rows(seen.to(tl.float32))
    rows, rest = two_terms(rows, PRECISION)
    state = load_state(dG_high, index, values, columns, E, D)
    dkeys = product(rows, rest, state, tl.zeros([L, BLOCK_D], tl.float32), HARD, PRECISION)
    if HARD and (rows.dtype != tl.float32):
        state = load_state(dG_low, index, values, columns, E, D)
        dkeys = tile_product(rows, state, dkeys, PRECISION)
    dkeys *= (power * tl.load(dG_scale + index))[:, None]
    curved = _by_rows(keys, dH_high, dH_low, index, columns, columns, D, D, HARD, PRECISION)
    curved *= tl.load(dH_scale + index)
    gate_gradient = tl.sum((dkeys - 0.5 * curved) * keys.to(tl.float32), 1) * to_end
    dkeys = (dkeys - curved) * to_end[:, None]

    # What comes from within the chunk.
    q_factor = load_sizes(q_size, tokens, valid, head, heads)
    e_factor = load_sizes(e_size, tokens, valid, head, heads)
    key_query = _by_solution(keys, q_high, q_low, tokens, valid, head, heads, columns, D, L, HARD, PRECISION)
    gain = _by_solution(keys, e_high, e_low, tokens, valid, head, heads, columns, D, L, HARD, PRECISION)
    incoming = load_rows(e, tokens, valid, head, heads, values, E)
    gain = tile_product(seen, tl.trans(incoming), gain * -e_factor[None, :], PRECISION)
    s = tl.arange(0, L)
    later = (s[None, :] >= s[:, None]) & valid[:, None] & valid[None, :]
    decay = tl.where(later, tl.exp(tl.where(later, to_token[None, :] - to_token[:, None], 0.0)), 0.0)
    key_query *= decay * q_factor[None, :]
    gate_gradient += tl.sum(key_query * gain, 1)
    tl.store(dbeta + tokens * heads + head, gate_gradient, mask=valid)
    gain *= decay * q_factor[None, :]
    dkeys += _of_solution(gain, q_high, q_low, tokens, valid, head, heads, columns, D, HARD, PRECISION)
    rows = key_query * e_factor[None, :]
    dkeys -= _of_solution(rows, e_high, e_low, tokens, valid, head, heads, columns, D, HARD, PRECISION)
    tl.debug_barrier()  # what one thread overwrites another one may still read
    store_rows(dk, dkeys * gate[:, None], tokens, valid, head, heads, columns, D)

    dvalues = _by_rows(keys, dG_high, dG_low, index, values, columns, E, D, HARD, PRECISION)
    dvalues = input_product(key_query, incoming, dvalues * (to_end * tl.load(dG_scale + index))[:, None], PRECISION)
    store_rows(dv, dvalues * gate[:, None], tokens, valid, head, heads, values, E)


@triton.jit
def _by_rows(
    keys, high, low, index, rows, columns,
    HEIGHT: tl.constexpr, D: tl.constexpr, HARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """k_s . row of a state, for every token and row, but for the state's scale."""
    state = load_state(high, index, rows, columns, HEIGHT, D)
    result = tile_product(keys, tl.trans(state), tl.zeros([keys.shape[0], rows.shape[0]], tl.float32), PRECISION)
    if HARD and (keys.dtype != tl.float32):
        state = load_state(low, index, rows, columns, HEIGHT, D)
        result = tile_product(keys, tl.trans(state), result, PRECISION)
    return result


@triton.jit
def _by_solution(
    keys, high, low, tokens, valid, head, heads, columns,
    D: tl.constexpr, L: tl.constexpr, HARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """k_s . solution_t for all pairs of the chunk [s, t], but for the solutions' sizes."""
    x = load_rows(high, tokens, valid, head, heads, columns, D)
    result = tile_product(keys, tl.trans(x), tl.zeros([L, L], tl.float32), PRECISION)
    if HARD and (x.dtype != tl.float32):
        x = load_rows(low, tokens, valid, head, heads, columns, D)
        result = tile_product(keys, tl.trans(x), result, PRECISION)
    return result


@triton.jit
def _of_solution(
    rows, high, low, tokens, valid, head, heads, columns, D: tl.constexpr, HARD: tl.constexpr, PRECISION: tl.constexpr
):
    """sum_t rows [s, t] solution_t [L, D], but for the solutions' sizes."""
    rows, power = scaled_rows(rows)
    rows, rest = two_terms(rows, PRECISION)
    x = load_rows(high, tokens, valid, head, heads, columns, D)
    result = product(rows, rest, x, tl.zeros(x.shape, tl.float32), HARD, PRECISION)
    if HARD and (x.dtype != tl.float32):
        x = load_rows(low, tokens, valid, head, heads, columns, D)
        result = tile_product(rows, x, result, PRECISION)
    return result * power[:, None]


@triton.jit
def backward_queries(
    e_high, e_size,  # [N, heads, D] and [N, heads] float32: e*, by solve_backward
    dq,  # [N, heads, D], written; may lie where e_high does
    N, heads,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """The gradient of q is e*, of L tokens of one head; torch would take four times as long for types that differ."""
    tokens, head = tl.program_id(0).to(tl.int64) * L + tl.arange(0, L), tl.program_id(1)
    columns = tl.arange(0, BLOCK_D)
    rows = load_rows(e_high, tokens, tokens < N, head, heads, columns, D).to(tl.float32)
    sizes = load_sizes(e_size, tokens, tokens < N, head, heads)
    store_rows(dq, rows * sizes[:, None], tokens, tokens < N, head, heads, columns, D)


@triton.jit
def backward_gates(
    log_gamma, beta,  # [N, heads] float32
    row_sums,  # [N, heads] float32, by solve_backward
    dbeta,  # [N, heads] float32, by backward_inputs
    across_H, across_G,  # [c, heads] float32: cotangents . states after the chunk
    dlog_gamma,  # [N, heads] float32, written
    chunks, length, per_sequence,  # see load_chunk
    heads,
    BLOCK_HEADS: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """The gradient of log_gamma for one chunk of BLOCK_HEADS heads.

    gamma_s scales every pair of a reader t >= s and a token before s: all that this chunk's readers t >= s saw, less
    what anyone saw of this chunk's tokens >= s, plus what readers after the chunk saw of it and all before.
    """
    chunk = tl.program_id(0)
    tokens, valid = load_chunk(chunks, chunk, length, per_sequence, L)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    inside = valid[:, None] & (head[None, :] < heads)
    offsets = tokens[:, None] * heads + head[None, :]
    index = chunk.to(tl.int64) * heads + head
    beyond = tl.load(across_G + index, mask=head < heads, other=0.0)
    beyond -= 0.5 * tl.load(across_H + index, mask=head < heads, other=0.0)
    sums = tl.load(row_sums + offsets, mask=inside, other=0.0)
    sums -= tl.load(dbeta + offsets, mask=inside, other=0.0) * tl.load(beta + offsets, mask=inside, other=0.0)
    later = tl.sum(sums, 0)[None, :] - tl.cumsum(sums, 0) + sums
    # What forgets all stays forgetting all: rounding must not look like a gradient there.
    moves = tl.load(log_gamma + offsets, mask=inside, other=0.0) > FORGETS_ALL
    tl.store(dlog_gamma + offsets, tl.where(moves, later + beyond[None, :], 0.0), mask=inside)
