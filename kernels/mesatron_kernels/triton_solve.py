"""Triton kernels that solve for one chunk of one head: forward for q* and the output, backward for e*."""

from __future__ import annotations

import triton
import triton.language as tl

from mesatron_kernels.triton_tiles import (
    decays_within,
    input_product,
    is_half,
    load_chunk,
    load_gates,
    load_keys,
    load_rows,
    load_sizes,
    load_state,
    power_above,
    product,
    scaled_rows,
    store_rows,
    store_solution,
    tile_product,
    two_terms,
)

# Squared residual of a row that float32 cannot improve; at tolerance 0 too there is nothing left to do.
_EXACT = tl.constexpr(1e-20)


@triton.jit
def _unit_rows(a):
    """Rows of a over their norms, and the norms; the largest entry is taken out first, so nothing underflows."""
    a, power = scaled_rows(a)
    norm = tl.sqrt(tl.sum(a * a, 1))
    return a / tl.where(norm > 0, norm, 1.0)[:, None], power * norm


@triton.jit
def _load_H(H_high, H_low, index, columns, D: tl.constexpr, HARD: tl.constexpr):
    """H before the chunk in both terms but for its scale; the low one if HARD, else the high one again."""
    high = load_state(H_high, index, columns, columns, D, D)
    if HARD and (high.dtype != tl.float32):
        return high, load_state(H_low, index, columns, columns, D, D)
    else:
        return high, high


@triton.jit
def _conjugate_gradients(
    b, H_high, H_low, scale, keys, weight, start, lam, max_steps, squared_tolerance,
    HARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Solve (start_t H + sum_s weight_(t,s) k_s k_s^T + Lambda) x_t = b_t for all rows of b [L, D].

    H is scale (H_high + H_low). Rows of b have norm 1 or 0. Starts at zero. A row stops when its residual norm is at
    most the tolerance. Returns x, squared residual norms and steps [L].
    The direction p is kept in 16 bits, scaled by `norm` to size about 1. x moves by that very p and r by its product,
    which keeps r the true residual of x.
    """
    direction_type: tl.constexpr = tl.float16 if is_half(PRECISION) else tl.float32
    from_start = start * scale
    x = tl.zeros_like(b)
    r = b
    rr = tl.sum(r * r, 1)
    enough = tl.maximum(squared_tolerance, _EXACT)
    norm = tl.where(rr > enough, 1.0, 0.0)
    p = r.to(direction_type)
    steps = tl.zeros_like(rr).to(tl.int32)
    step = 0
    worst = tl.max(rr, 0)
    while (step < max_steps) & (worst > enough):
        scores = tile_product(p, tl.trans(keys), tl.zeros_like(weight), PRECISION) * weight
        Ap = tile_product(p, H_high, tl.zeros_like(b), PRECISION)
        if HARD and (direction_type != tl.float32):
            Ap = tile_product(p, H_low, Ap, PRECISION)
        Ap = Ap * from_start[:, None]
        scores, rest = two_terms(scores, PRECISION)
        Ap = tile_product(scores, keys, Ap, PRECISION)
        if HARD and (direction_type != tl.float32):
            Ap = tile_product(rest, keys, Ap, PRECISION)
        direction = p.to(tl.float32)
        Ap += direction * lam[None, :]
        pAp = tl.sum(direction * Ap, 1)
        # r . p is rr * norm but for the rounding of p: r is orthogonal to the direction before.
        before = rr * norm
        # A NaN goes through, for training to see it.
        alpha = tl.where(pAp <= 0, 0.0, before / tl.where(pAp <= 0, 1.0, pAp))
        steps += (rr > enough).to(tl.int32)
        x += alpha[:, None] * direction
        r -= alpha[:, None] * Ap
        rr = tl.sum(r * r, 1)
        # A row that is done gets no direction, so it stays as it is whatever its neighbours still need.
        norm = tl.where(rr > enough, tl.rsqrt(tl.maximum(rr, enough)), 0.0)
        keep = tl.where(before > 0, rr * norm / tl.where(before > 0, before, 1.0), 0.0)
        p = (r * norm[:, None] + keep[:, None] * direction).to(direction_type)
        worst = tl.max(rr, 0)
        step += 1
    return x, rr, steps


@triton.jit(do_not_specialize=["max_steps"])
def solve_forward(
    q, k, v,  # [N, heads, D or E]
    beta, summed,  # [N, heads] float32
    lam,  # [heads, D] float32
    H_high, H_low, H_scale,  # [c, heads, D, D]: states before each chunk, by forward_states
    G_high, G_low, G_scale,  # [c, heads, E, D]
    hard,  # [c, heads] int32
    q_high, q_low, q_size,  # written: q* = (H + Lambda)^-1 q, by store_solution
    o,  # [N, heads, E], written: G q*
    steps, residual,  # [N, heads] int32 and float32, written
    chunks, length, per_sequence,  # see load_chunk
    heads,
    max_steps,
    tolerance,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Solve for q* and read the output off."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, valid = load_chunk(chunks, chunk, length, per_sequence, L)
    is_hard = tl.load(hard + chunk.to(tl.int64) * heads + head)
    for HARD in tl.static_range(2 if is_half(PRECISION) else 1):  # 32 bits have no low terms
        if is_hard == HARD or not is_half(PRECISION):
            _solve_forward(
                q, k, v, beta, summed, lam, H_high, H_low, H_scale, G_high, G_low, G_scale, q_high, q_low, q_size, o,
                steps, residual, chunk, head, tokens, valid, heads, max_steps, tolerance,
                D, E, BLOCK_D, BLOCK_E, L, HARD, PRECISION,
            )  # fmt: skip


@triton.jit
def _solve_forward(
    q, k, v, beta, summed, lam, H_high, H_low, H_scale, G_high, G_low, G_scale, q_high, q_low, q_size, o,
    steps, residual, chunk, head, tokens, valid, heads, max_steps, tolerance,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    L: tl.constexpr, HARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns, values = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    index = chunk.to(tl.int64) * heads + head
    high, low = _load_H(H_high, H_low, index, columns, D, HARD)
    keys = load_keys(k, tokens, valid, head, heads, columns, D, PRECISION)
    sides, norm = _unit_rows(load_rows(q, tokens, valid, head, heads, columns, D).to(tl.float32))
    gate, to_token = load_gates(beta, summed, tokens, valid, head, heads)
    weight = decays_within(to_token, valid, gate, L)
    start = tl.exp(to_token)
    regular = tl.load(lam + head * D + columns, mask=columns < D, other=1.0)
    scale = tl.load(H_scale + index)
    x, rr, taken = _conjugate_gradients(
        sides, high, low, scale, keys, weight, start, regular, max_steps, tolerance * tolerance, HARD, PRECISION
    )
    tl.store(steps + tokens * heads + head, taken, mask=valid)
    tl.store(residual + tokens * heads + head, tl.sqrt(rr), mask=valid)
    x, rest, power = store_solution(
        q_high, q_low, q_size, x, norm, tokens, valid, head, heads, columns, D, HARD, PRECISION
    )
    power *= norm
    y = tl.zeros([L, BLOCK_E], tl.float32)
    state = load_state(G_high, index, values, columns, E, D)
    y = product(x, rest, tl.trans(state), y, HARD, PRECISION)
    if HARD and (x.dtype != tl.float32):
        state = load_state(G_low, index, values, columns, E, D)
        y = tile_product(x, tl.trans(state), y, PRECISION)
    y *= (tl.load(G_scale + index) * start * power)[:, None]
    scores = product(x, rest, tl.trans(keys), tl.zeros([L, L], tl.float32), HARD, PRECISION)
    scores *= weight * power[:, None]
    seen = load_rows(v, tokens, valid, head, heads, values, E)
    y = input_product(scores, seen, y, PRECISION)
    store_rows(o, y, tokens, valid, head, heads, values, E)


@triton.jit(do_not_specialize=["max_steps"])
def solve_backward(
    e, k, v,  # [N, heads, E or D]
    beta, summed,  # [N, heads] float32
    lam,  # [heads, D] float32
    H_high, H_low, H_scale,  # [c, heads, D, D]
    G_high, G_low, G_scale,  # [c, heads, E, D]
    hard,  # [c, heads] int32
    q_high, q_low, q_size,  # q*, by solve_forward
    e_high, e_low, e_size,  # written: e* = (H + Lambda)^-1 G^T e
    keys,  # [N, heads, D] float16, written: k; or None
    row_sums,  # [N, heads] float32, written: e* . Lambda q*, the sum over s of all that token t saw
    dlam,  # [c, heads, D] float32, written: each chunk's part
    largest,  # [2, c, heads] float32, written: of q_size e_size, and of q_size |e|
    chunks, length, per_sequence,  # see load_chunk
    heads,
    max_steps,
    tolerance,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Form the right-hand side G^T e and solve for e*."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, valid = load_chunk(chunks, chunk, length, per_sequence, L)
    if keys is not None:
        columns = tl.arange(0, BLOCK_D)
        rows = load_keys(k, tokens, valid, head, heads, columns, D, PRECISION)
        store_rows(keys, rows, tokens, valid, head, heads, columns, D)
    is_hard = tl.load(hard + chunk.to(tl.int64) * heads + head)
    for HARD in tl.static_range(2 if is_half(PRECISION) else 1):  # 32 bits have no low terms
        if is_hard == HARD or not is_half(PRECISION):
            _solve_backward(
                e, k, v, beta, summed, lam, H_high, H_low, H_scale, G_high, G_low, G_scale, q_high, q_low, q_size,
                e_high, e_low, e_size, row_sums, dlam, largest, chunk, head, tokens, valid, heads, max_steps,
                tolerance, D, E, BLOCK_D, BLOCK_E, L, HARD, PRECISION,
            )  # fmt: skip


@triton.jit
def _solve_backward(
    e, k, v, beta, summed, lam, H_high, H_low, H_scale, G_high, G_low, G_scale, q_high, q_low, q_size,
    e_high, e_low, e_size, row_sums, dlam, largest, chunk, head, tokens, valid, heads, max_steps, tolerance,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    L: tl.constexpr, HARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns, values = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    gate, to_token = load_gates(beta, summed, tokens, valid, head, heads)
    weight = decays_within(to_token, valid, gate, L)
    start = tl.exp(to_token)
    keys = load_keys(k, tokens, valid, head, heads, columns, D, PRECISION)
    incoming = load_rows(e, tokens, valid, head, heads, values, E)
    seen = load_rows(v, tokens, valid, head, heads, values, E)
    scores = tile_product(incoming, tl.trans(seen), tl.zeros([L, L], tl.float32), PRECISION) * weight
    rows, power = scaled_rows(incoming.to(tl.float32))
    q_factor = load_sizes(q_size, tokens, valid, head, heads)
    index = chunk.to(tl.int64) * heads + head
    tl.store(largest + tl.num_programs(0).to(tl.int64) * heads + index, tl.max(q_factor * power, 0))
    power *= tl.load(G_scale + index) * start
    size = tl.maximum(power, power_above(tl.max(tl.abs(scores), 1)))
    rows, rest = two_terms(rows, PRECISION)
    state = load_state(G_high, index, values, columns, E, D)
    sides = product(rows, rest, state, tl.zeros([L, BLOCK_D], tl.float32), HARD, PRECISION)
    if HARD and (rows.dtype != tl.float32):
        state = load_state(G_low, index, values, columns, E, D)
        sides = tile_product(rows, state, sides, PRECISION)
    sides *= (power / size)[:, None]
    scores, rest = two_terms(scores * (1.0 / size)[:, None], PRECISION)
    sides = product(scores, rest, keys, sides, True, PRECISION)
    sides, norm = _unit_rows(sides)
    norm *= size

    high, low = _load_H(H_high, H_low, index, columns, D, HARD)
    regular = tl.load(lam + head * D + columns, mask=columns < D, other=1.0)
    scale, enough = tl.load(H_scale + index), tolerance * tolerance
    x, _, _ = _conjugate_gradients(
        sides, high, low, scale, keys, weight, start, regular, max_steps, enough, HARD, PRECISION
    )
    _, _, power = store_solution(
        e_high, e_low, e_size, x, norm, tokens, valid, head, heads, columns, D, HARD, PRECISION
    )
    solved = load_rows(q_high, tokens, valid, head, heads, columns, D).to(tl.float32)
    if HARD and is_half(PRECISION):
        solved += load_rows(q_low, tokens, valid, head, heads, columns, D).to(tl.float32)
    tl.store(largest + index, tl.max(q_factor * power * norm, 0))
    products = x * solved * (norm * q_factor)[:, None]
    tl.store(row_sums + tokens * heads + head, tl.sum(products * regular[None, :], 1), mask=valid)
    tl.store(dlam + index * D + columns, -tl.sum(products, 0), mask=columns < D)
