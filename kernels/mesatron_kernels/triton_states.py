"""Triton kernels that go along a sequence: decays, the states before every chunk, and their cotangents after it."""

from __future__ import annotations

import triton
import triton.language as tl

from mesatron_kernels.triton_tiles import (
    FORGETS_ALL,
    is_half,
    load_chunk,
    load_rows,
    power_above,
    product,
    state_offsets,
    store_rows,
    store_state,
    tile_product,
    two_terms,
)


@triton.jit
def prepare(
    k, v,  # [N, heads, D or E]
    log_gamma, beta,  # [N, heads] float32
    keys,  # [N, heads, D] float16, written: k; or None
    summed,  # [N, heads] float32, written: log gamma summed from the chunk's start
    norms,  # [c, heads, 2] float32, written: Frobenius norm of the chunk's sum of beta k k^T, not decayed, and decayed
    largest,  # [2, c, heads] float32, written: largest entries of beta k and beta v
    chunks, length, per_sequence,  # see load_chunk
    heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the scans need of each chunk of one head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, valid = load_chunk(chunks, chunk, length, per_sequence, L)
    columns = tl.arange(0, BLOCK_D)
    offsets = tokens * heads + head
    gates = tl.maximum(tl.load(log_gamma + offsets, mask=valid, other=0.0), FORGETS_ALL)
    to_token = tl.cumsum(gates, 0)
    tl.store(summed + offsets, to_token, mask=valid)
    rows = load_rows(k, tokens, valid, head, heads, columns, D)
    if keys is not None:
        rows = rows.to(tl.float16)
        store_rows(keys, rows, tokens, valid, head, heads, columns, D)
    overlaps = tile_product(rows, tl.trans(rows), tl.zeros([L, L], tl.float32), PRECISION)
    overlaps *= overlaps
    gate = tl.load(beta + offsets, mask=valid, other=0.0)
    index = chunk.to(tl.int64) * heads + head
    tl.store(norms + 2 * index, _weighted_norm(overlaps, gate))
    tl.store(largest + index, tl.max(gate * tl.max(tl.abs(rows.to(tl.float32)), 1), 0))
    rows = load_rows(v, tokens, valid, head, heads, tl.arange(0, BLOCK_E), E).to(tl.float32)
    rows_before = tl.num_programs(0).to(tl.int64) * heads
    tl.store(largest + rows_before + index, tl.max(gate * tl.max(tl.abs(rows), 1), 0))
    gate *= tl.exp(tl.sum(gates, 0) - to_token)
    tl.store(norms + 2 * index + 1, _weighted_norm(overlaps, gate))


@triton.jit
def _weighted_norm(overlaps, weight):
    """Frobenius norm of sum_s weight_s k_s k_s^T, by the squares of the keys' inner products [L, L]."""
    return tl.sqrt(tl.sum(tl.sum(overlaps * weight[None, :], 1) * weight, 0))


@triton.jit
def _bounds(sequences, first_chunk, sequence, length, per_sequence):
    """First token of a sequence, the one after its last, its first chunk and how many it has."""
    if sequences is None:
        begin = sequence.to(tl.int64) * length
        end = begin + length
        first = sequence * per_sequence
        count = per_sequence
    else:
        begin = tl.load(sequences + sequence).to(tl.int64)
        end = tl.load(sequences + sequence + 1).to(tl.int64)
        first = tl.load(first_chunk + sequence)
        count = tl.load(first_chunk + sequence + 1) - first
    return begin, end, first, count


@triton.jit
def _unit(largest, bound):
    """The unit in which a chunk is added to a state: in it rows of the chunk fit float16 and the state float32."""
    return power_above(tl.maximum(largest, bound * 1e-6))


@triton.jit
def _tightened(bound, state, is_hard):
    """The largest entry of the state if its low term will count, for none of its bits to be lost; else `bound`."""
    if is_hard:
        bound = tl.max(tl.max(tl.abs(state), 1), 0)
    return bound


@triton.jit
def forward_states(
    k,  # [N, heads, D] float16 or float32
    w,  # [N, heads, E]: k for the state H, v for the state G
    beta, summed,  # [N, heads] float32
    norms,  # [c, heads, 2] float32, by `prepare`
    largest,  # [c, heads] float32, by `prepare`: largest entry of beta w
    lam,  # [heads, D] float32
    initial,  # [sequences, heads, E, D] float32, or None
    high, low, scale,  # [c, heads, E, D] and [c, heads], written by store_state
    hard,  # [c, heads] int32: whether the chunk is hard; written if IS_H, else read
    final,  # [sequences, heads, E, D] float32, written
    decay,  # None; or [sequences, heads] float32, the decay over a sequence: then only it and `final` are written
    sequences,  # [sequences + 1] int32: bounds of sequences, or None: all of `length` tokens
    first_chunk,  # [sequences + 1] int32, or None
    length,
    per_sequence,
    heads,
    hardness,
    IS_H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Decayed sums of beta w k^T before every chunk and after the last, for one head of one sequence."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    begin, end, first, count = _bounds(sequences, first_chunk, sequence, length, per_sequence)
    state = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    bound = 0.0  # on every entry of the state; for H, on its norm
    whole, inside = state_offsets(sequence, head, heads, rows, columns, E, D)
    if initial is not None:
        state = tl.load(initial + whole, mask=inside, other=0.0)
        bound = tl.sqrt(tl.sum(tl.sum(state * state, 1), 0))
    if IS_H:
        limit = hardness * tl.min(tl.load(lam + head * D + columns, mask=columns < D, other=float("inf")), 0)
    kept = 1.0
    gate, total, keys, values = _load_pairs(k, w, beta, summed, begin, end, 0, head, heads, rows, columns, D, E, L)
    for ahead in range(count):
        # The next chunk is on its way while this one is worked on.
        next_gate, next_total, next_keys, next_values = _load_pairs(
            k, w, beta, summed, begin, end, ahead + 1, head, heads, rows, columns, D, E, L
        )
        index = (first + ahead).to(tl.int64) * heads + head
        added = tl.load(largest + index)
        if IS_H:
            is_hard = bound + tl.load(norms + 2 * index) > limit
            if decay is None:
                tl.store(hard + index, is_hard.to(tl.int32))
        else:
            is_hard = tl.load(hard + index) != 0
            bound = _tightened(bound, state, is_hard)
        if decay is None:
            offsets, _ = state_offsets(first + ahead, head, heads, rows, columns, E, D)
            store_state(high, low, scale, state, power_above(bound), offsets, inside, index, is_hard, PRECISION)
        unit = _unit(added, bound)
        bound = bound * total + (tl.load(norms + 2 * index + 1) if IS_H else L * added)
        kept *= total
        left, rest = two_terms(values.to(tl.float32) * (gate * (1.0 / unit))[:, None], PRECISION)
        state = product(tl.trans(left), tl.trans(rest), keys, state * (total / unit), True, PRECISION) * unit
        gate, total, keys, values = next_gate, next_total, next_keys, next_values
    tl.store(final + whole, state, mask=inside)
    if decay is not None:
        tl.store(decay + sequence * heads + head, kept)


@triton.jit
def _load_pairs(
    k, w, beta, summed, begin, end, ahead, head, heads, rows, columns,
    D: tl.constexpr, E: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """One chunk of a sequence, empty past its end: beta decayed to the chunk's end, the decay over the chunk, and rows
    of k and w.
    """
    tokens = begin + ahead * L + tl.arange(0, L)
    valid = tokens < end
    offsets = tokens * heads + head
    last = tl.maximum(tl.minimum(begin + ahead * L + L, end) - 1, 0)
    total = tl.load(summed + last * heads + head)
    gate = tl.load(beta + offsets, mask=valid, other=0.0)
    gate *= tl.exp(total - tl.load(summed + offsets, mask=valid, other=0.0))
    keys = load_rows(k, tokens, valid, head, heads, columns, D)
    values = load_rows(w, tokens, valid, head, heads, rows, E)
    return gate, tl.exp(total), keys, values


@triton.jit
def backward_states(
    e,  # [N, heads, E], if not IS_H
    q_high, q_low, q_size,  # q* [N, heads, D], by store_solution
    e_high, e_low, e_size,  # e* likewise, if IS_H
    summed,  # [N, heads] float32
    largest,  # [c, heads] float32: largest entry of what is added, but for decays
    final,  # [sequences, heads, E, D] float32: cotangent after the last chunk, or None
    high, low, scale,  # [c, heads, E, D] and [c, heads], written by store_state: cotangent after each chunk
    initial,  # [sequences, heads, E, D] float32, written: cotangent before the first chunk
    S_high, S_low, S_scale,  # the forward state before each chunk
    S_final,  # [sequences, heads, E, D] float32: the forward state after the last chunk
    hard,  # [c, heads] int32
    across,  # [c, heads] float32, written: cotangent . forward state after each chunk; None: only `initial` is written
    sequences, first_chunk, length, per_sequence,  # as in forward_states
    heads,
    IS_H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums decayed backwards in time, of e q*^T for G and of q* e*^T + e* q*^T for H."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    begin, end, first, count = _bounds(sequences, first_chunk, sequence, length, per_sequence)
    state = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    bound = 0.0  # on every entry of the state
    whole, inside = state_offsets(sequence, head, heads, rows, columns, E, D)
    if final is not None:
        state = tl.load(final + whole, mask=inside, other=0.0)
        bound = tl.max(tl.max(tl.abs(state), 1), 0)
    if across is not None:
        overlap = tl.sum(tl.sum(state * tl.load(S_final + whole, mask=inside, other=0.0), 1), 0)
        tl.store(across + (first + count - 1).to(tl.int64) * heads + head, overlap, mask=count > 0)
    right_rows = e_high if IS_H else e
    factor, total, solved, other = _load_solved(
        right_rows, q_high, q_size, e_size, summed, begin, end, count - 1, head, heads, rows, columns, IS_H, D, E, L
    )
    for back in range(count):
        ahead = count - 1 - back
        next_factor, next_total, next_solved, next_other = _load_solved(
            right_rows, q_high, q_size, e_size, summed, begin, end, ahead - 1, head, heads, rows, columns, IS_H, D, E,
            L,
        )  # fmt: skip
        index = (first + ahead).to(tl.int64) * heads + head
        is_hard = tl.load(hard + index) != 0
        offsets, _ = state_offsets(first + ahead, head, heads, rows, columns, E, D)
        bound = _tightened(bound, state, is_hard)
        if across is not None:
            forward = tl.load(S_high + offsets, mask=inside, other=0.0)
            store_state(high, low, scale, state, power_above(bound), offsets, inside, index, is_hard, PRECISION)
        added = tl.load(largest + index)
        unit = _unit(added, bound)
        bound = bound * total + (2 if IS_H else 1) * L * added
        factor *= 1.0 / unit
        state *= total / unit
        left, _ = two_terms(other.to(tl.float32) * factor[:, None], PRECISION)
        state = tile_product(tl.trans(left), solved, state, PRECISION)
        if IS_H:
            left, _ = two_terms(solved.to(tl.float32) * factor[:, None], PRECISION)
            state = tile_product(tl.trans(left), other, state, PRECISION)
        if is_half(PRECISION):
            if is_hard:
                tokens = begin + ahead * L + tl.arange(0, L)
                state = _add_low_terms(
                    state, solved, other, factor, q_low, e_low, tokens, tokens < end, head, heads, columns,
                    IS_H, D, PRECISION,
                )  # fmt: skip
        state *= unit
        if across is not None:
            overlap = tl.sum(tl.sum(state * forward.to(tl.float32), 1), 0)
            if is_half(PRECISION):
                if is_hard:
                    low_term = tl.load(S_low + offsets, mask=inside, other=0.0).to(tl.float32)
                    overlap += tl.sum(tl.sum(state * low_term, 1), 0)
            overlap *= tl.load(S_scale + index)
            tl.store(across + index - heads, overlap, mask=ahead > 0)
        factor, total, solved, other = next_factor, next_total, next_solved, next_other
    tl.store(initial + whole, state, mask=inside)


@triton.jit
def _load_solved(
    right_rows, q_high, q_size, e_size, summed, begin, end, ahead, head, heads, rows, columns,
    IS_H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """One chunk of a sequence, empty before its start: sizes times decays from the chunk's start, the decay over the
    chunk, rows of q*, and of e* or e.
    """
    tokens = begin + ahead * L + tl.arange(0, L)
    valid = (tokens < end) & (ahead >= 0)
    offsets = tokens * heads + head
    last = tl.maximum(tl.minimum(begin + ahead * L + L, end) - 1, 0)
    factor = tl.load(q_size + offsets, mask=valid, other=0.0)
    factor *= tl.exp(tl.load(summed + offsets, mask=valid, other=0.0))
    if IS_H:
        factor *= tl.load(e_size + offsets, mask=valid, other=0.0)
    solved = load_rows(q_high, tokens, valid, head, heads, columns, D)
    other = load_rows(right_rows, tokens, valid, head, heads, rows, E)
    return factor, tl.exp(tl.load(summed + last * heads + head)), solved, other


@triton.jit
def _add_low_terms(
    state, solved, other, factor, q_low, e_low, tokens, valid, head, heads, columns,
    IS_H: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the low terms of one chunk's products add."""
    solved_low = load_rows(q_low, tokens, valid, head, heads, columns, D)
    if IS_H:
        other_low = load_rows(e_low, tokens, valid, head, heads, columns, D)
        state = _low_products(state, other, other_low, solved, solved_low, factor, PRECISION)
        state = _low_products(state, solved, solved_low, other, other_low, factor, PRECISION)
    else:
        state = _low_products(state, other, None, solved, solved_low, factor, PRECISION)
    return state


@triton.jit
def _low_products(state, left, left_low, right, right_low, factor, PRECISION: tl.constexpr):
    """Add (factor (left + left_low))^T (right + right_low) but for its leading term, high times high."""
    value = left.to(tl.float32)
    first, _ = two_terms(value * factor[:, None], PRECISION)
    if left_low is not None:
        value += left_low.to(tl.float32)
    value *= factor[:, None]
    rest = (value - first.to(tl.float32)).to(first.dtype)
    state = tile_product(tl.trans(first), right_low, state, PRECISION)
    return tile_product(tl.trans(rest), right, state, PRECISION)


@triton.jit
def combine(
    added,  # [pieces, heads, size] float32: what each piece of a sequence adds to a state that passes through it
    decay,  # [pieces, heads] float32: what it leaves of one
    outer,  # [sequences, heads, size] float32: the state that enters a sequence, or None
    entering,  # [pieces, heads, size] float32, written: the state that enters each piece
    first_piece,  # [sequences + 1] int32
    heads,
    size,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """States that enter the pieces of a sequence from its front, or with BACKWARD from its back; BLOCK entries."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    entries = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < size
    state = tl.zeros([BLOCK], tl.float32)
    if outer is not None:
        state = tl.load(outer + (sequence.to(tl.int64) * heads + head) * size + entries, mask=inside, other=0.0)
    first, end = tl.load(first_piece + sequence), tl.load(first_piece + sequence + 1)
    for i in range(end - first):
        piece = end - 1 - i if BACKWARD else first + i
        index = piece.to(tl.int64) * heads + head
        tl.store(entering + index * size + entries, state, mask=inside)
        state = state * tl.load(decay + index) + tl.load(added + index * size + entries, mask=inside, other=0.0)
