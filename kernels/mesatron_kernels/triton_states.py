"""Triton kernels that go along a sequence: decays, the states before every chunk, and their cotangents after it."""

from __future__ import annotations

import triton
import triton.language as tl

from mesatron_kernels.triton_tiles import (
    FORGETS_ALL,
    as_keys,
    is_half,
    load_chunk,
    load_keys,
    load_rows,
    load_state,
    power_above,
    product,
    ratio,
    state_base,
    state_places,
    store_state,
    tile_product,
    two_terms,
)


@triton.jit
def prepare(
    k, v,  # [N, heads, D or E]
    log_gamma, beta,  # [N, heads] float32
    summed,  # [N, heads] float32, written: log gamma summed from the chunk's start
    norms,  # [c, heads, 2] float32, written: Frobenius norm of the chunk's sum of beta k k^T, not decayed, and decayed
    largest_k, largest_v,  # [c, heads] float32, written: largest entries of beta k and beta v
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
    gates = tl.load(log_gamma + offsets, mask=valid, other=0.0)
    gates = tl.where(gates < FORGETS_ALL, FORGETS_ALL, gates)  # a GPU's maximum would hide what is no number
    to_token = tl.cumsum(gates, 0)
    tl.store(summed + offsets, to_token, mask=valid)
    rows = load_keys(k, tokens, valid, head, heads, columns, D, PRECISION)
    overlaps = tile_product(rows, tl.trans(rows), tl.zeros([L, L], tl.float32), PRECISION)
    overlaps *= overlaps
    gate = tl.load(beta + offsets, mask=valid, other=0.0)
    index = chunk.to(tl.int64) * heads + head
    tl.store(norms + 2 * index, _weighted_norm(overlaps, gate))
    tl.store(largest_k + index, tl.max(gate * tl.max(tl.abs(rows.to(tl.float32)), 1), 0))
    rows = load_rows(v, tokens, valid, head, heads, tl.arange(0, BLOCK_E), E).to(tl.float32)
    tl.store(largest_v + index, tl.max(gate * tl.max(tl.abs(rows), 1), 0))
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
def _norm(state):
    """Frobenius norm."""
    return tl.sqrt(tl.sum(tl.sum(state * state, 1), 0))


@triton.jit
def _unit(largest, bound):
    """The unit in which a chunk is added to a state: in it rows of the chunk fit float16 and the state float32."""
    return power_above(tl.maximum(largest, bound * 1e-6))


@triton.jit
def _tightened(bound, state, unit, is_hard):
    """The largest entry of the state if its low term will count, for none of its bits to be lost; else `bound`."""
    if is_hard:
        bound = tl.max(tl.max(tl.abs(state), 1), 0) * unit
    return bound


@triton.jit
def forward_states(
    k,  # [N, heads, D]
    v,  # [N, heads, E]
    beta, summed,  # [N, heads] float32
    norms,  # [c, heads, 2] float32, by `prepare`
    largest_k, largest_v,  # [c, heads] float32, by `prepare`: largest entries of beta k and beta v
    lam,  # [heads, D] float32
    initial_H, initial_G,  # [sequences, heads, D or E, D] float32, or None
    H_high, H_low, H_scale,  # [c, heads, D, D] and [c, heads], written by store_state: H before each chunk
    G_high, G_low, G_scale,  # [c, heads, E, D] and [c, heads], likewise
    hard,  # [c, heads] int32, written: whether the chunk is hard
    final_H, final_G,  # [sequences, heads, D or E, D] float32, written; or None
    decay,  # None; or [sequences, heads] float32, the decay over a sequence: then only it and `final` are written
    sequences,  # [sequences + 1] int32: bounds of sequences, or None: all of `length` tokens
    first_chunk,  # [sequences + 1] int32, or None
    length,
    per_sequence,
    heads,
    hardness,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Decayed sums of beta k k^T and beta v k^T before every chunk and after the last, for one head of one sequence.

    H and G are two programs, which share a multiprocessor: neither fills it.
    """
    if tl.program_id(2) == 0:
        _forward_states(
            k, k, beta, summed, norms, largest_k, lam, initial_H, initial_H, H_high, H_low, H_scale, hard, final_H,
            decay, sequences, first_chunk, length, per_sequence, heads, hardness, True, D, D, BLOCK_D, BLOCK_D, L,
            PRECISION,
        )  # fmt: skip
    else:
        _forward_states(
            k, v, beta, summed, norms, largest_v, lam, initial_G, initial_H, G_high, G_low, G_scale, hard, final_G,
            decay, sequences, first_chunk, length, per_sequence, heads, hardness, False, D, E, BLOCK_D, BLOCK_E, L,
            PRECISION,
        )  # fmt: skip


@triton.jit
def _forward_states(
    k, w, beta, summed, norms, largest, lam, initial, initial_H, high, low, scale, hard, final, decay, sequences,
    first_chunk, length, per_sequence, heads, hardness, IS_H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state is kept as `unit` times what `state` holds, so that neither a chunk's rows nor the state overflow."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    begin, end, first, count = _bounds(sequences, first_chunk, sequence, length, per_sequence)
    place, inside = state_places(rows, columns, E, D)
    whole = state_base(sequence.to(tl.int64) * heads + head, E, D)
    state, unit = tl.zeros([BLOCK_E, BLOCK_D], tl.float32), 1.0
    norm, bound = 0.0, 0.0  # of the norm of H, and of every entry of the state
    if initial is not None:
        norm = _norm(load_state(initial_H, sequence.to(tl.int64) * heads + head, columns, columns, D, D))
        state = tl.load(initial + whole + place, mask=inside, other=0.0)
        bound = _norm(state)
    limit = hardness * tl.min(tl.load(lam + head * D + columns, mask=columns < D, other=float("inf")), 0)
    # H alone says which chunks are hard; where the same sums, rounded otherwise, could say so, G has its low terms.
    if not IS_H:
        limit *= 0.999
    kept = 1.0
    gate, total, keys, values, added, overlap, decayed = _load_pairs(
        k, w, beta, summed, norms, largest, begin, end, first, count, 0, head, heads, rows, columns, IS_H, D, E, L
    )
    for ahead in range(count):
        # The next chunk is on its way while this one is worked on.
        next_gate, next_total, next_keys, next_values, next_added, next_overlap, next_decayed = _load_pairs(
            k,
            w,
            beta,
            summed,
            norms,
            largest,
            begin,
            end,
            first,
            count,
            ahead + 1,
            head,
            heads,
            rows,
            columns,
            IS_H,
            D,
            E,
            L,
        )
        if decay is None:
            index = (first + ahead).to(tl.int64) * heads + head
            is_hard = norm + overlap > limit
            if IS_H:
                tl.store(hard + index, is_hard.to(tl.int32))
            else:
                bound = _tightened(bound, state, unit, is_hard)
            power = power_above(bound)
            state, unit = state * ratio(unit, power), power
            store_state(high, low, scale, state, unit, place, inside, index, is_hard, E, D, PRECISION)
        new_unit = _unit(added, bound)
        norm = norm * total + decayed
        if IS_H:
            bound = norm
        else:
            bound = bound * total + L * added
        kept *= total
        left, rest = two_terms(values.to(tl.float32) * (gate * (1.0 / new_unit))[:, None], PRECISION)
        state *= total * ratio(unit, new_unit)
        # Here, for the load to be waited for as late as can be. H's other factor is as loaded: the two differ where a
        # key's entries are below float16's 2^-14, by 2^-25 at most.
        keys = as_keys(keys, PRECISION)
        state, unit = product(tl.trans(left), tl.trans(rest), keys, state, True, PRECISION), new_unit
        gate, total, keys, values = next_gate, next_total, next_keys, next_values
        added, overlap, decayed = next_added, next_overlap, next_decayed
    if final is not None:
        tl.store(final + whole + place, state * unit, mask=inside)
    if IS_H and (decay is not None):
        tl.store(decay + sequence * heads + head, kept)


@triton.jit
def _load_pairs(
    k, w, beta, summed, norms, largest, begin, end, first, count, ahead, head, heads, rows, columns,
    IS_H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """One chunk of a sequence, empty past its end: beta decayed to the chunk's end, the decay over the chunk, rows of k
    and w, and the chunk's largest entry and two norms (see `prepare`).
    """
    tokens = begin + ahead * L + tl.arange(0, L)
    valid = tokens < end
    offsets = tokens * heads + head
    last = tl.maximum(tl.minimum(begin + ahead * L + L, end) - 1, 0)
    total = tl.load(summed + last * heads + head)
    gate = tl.load(beta + offsets, mask=valid, other=0.0)
    gate *= tl.exp(total - tl.load(summed + offsets, mask=valid, other=0.0))
    keys = load_rows(k, tokens, valid, head, heads, columns, D)
    values = keys if IS_H else load_rows(w, tokens, valid, head, heads, rows, E)
    index, exists = (first + ahead).to(tl.int64) * heads + head, ahead < count
    added = tl.load(largest + index, mask=exists, other=0.0)
    whole = tl.load(norms + 2 * index, mask=exists, other=0.0)
    decayed = tl.load(norms + 2 * index + 1, mask=exists, other=0.0)
    return gate, tl.exp(total), keys, values, added, whole, decayed


@triton.jit
def backward_states(
    e,  # [N, heads, E]
    q_high, q_low, q_size,  # q* [N, heads, D], by store_solution
    e_high, e_low, e_size,  # e* likewise
    summed,  # [N, heads] float32
    largest_H, largest_G,  # [c, heads] float32, by solve_backward: largest entries of what is added, but for decays
    final_H, final_G,  # [sequences, heads, D or E, D] float32: cotangents after the last chunk, or None
    H_high, H_low, H_scale,  # [c, heads, D, D] and [c, heads]: H after each chunk, overwritten by its cotangent there
    G_high, G_low, G_scale,  # [c, heads, E, D] and [c, heads], likewise
    initial_H, initial_G,  # [sequences, heads, D or E, D] float32, written: cotangents before the first chunk; or None
    last_H, last_G,  # [sequences, heads, D or E, D] float32: H and G after the last chunk, or None if `final` is
    hard,  # [c, heads] int32
    across_H, across_G,  # [c, heads] float32, written: cotangent . state after each chunk; None: only `initial` is
    sequences, first_chunk, length, per_sequence,  # as in forward_states
    heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums decayed backwards in time, of e q*^T for G and of q* e*^T + e* q*^T for H, by two programs as in
    forward_states.
    """
    if tl.program_id(2) == 0:
        _backward_states(
            e_high, q_high, q_low, q_size, e_low, e_size, summed, largest_H, final_H, H_high, H_low, H_scale, initial_H,
            last_H, hard, across_H, sequences, first_chunk, length, per_sequence, heads, True, D, D, BLOCK_D, BLOCK_D,
            L, PRECISION,
        )  # fmt: skip
    else:
        _backward_states(
            e, q_high, q_low, q_size, e_low, e_size, summed, largest_G, final_G, G_high, G_low, G_scale, initial_G,
            last_G, hard, across_G, sequences, first_chunk, length, per_sequence, heads, False, D, E, BLOCK_D, BLOCK_E,
            L, PRECISION,
        )  # fmt: skip


@triton.jit
def _backward_states(
    right_rows, q_high, q_low, q_size, e_low, e_size, summed, largest, final, high, low, scale, initial, last, hard,
    across, sequences, first_chunk, length, per_sequence, heads, IS_H: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The last chunk's place holds no forward state of this sequence: `last` has it."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    begin, end, first, count = _bounds(sequences, first_chunk, sequence, length, per_sequence)
    place, inside = state_places(rows, columns, E, D)
    whole = state_base(sequence.to(tl.int64) * heads + head, E, D)
    state, unit = tl.zeros([BLOCK_E, BLOCK_D], tl.float32), 1.0
    bound = 0.0  # on every entry of the state
    if final is not None:
        state = tl.load(final + whole + place, mask=inside, other=0.0)
        bound = tl.max(tl.max(tl.abs(state), 1), 0)
    if across is not None:
        overlap = 0.0
        if last is not None:
            overlap = tl.sum(tl.sum(state * tl.load(last + whole + place, mask=inside, other=0.0), 1), 0)
        tl.store(across + (first + count - 1).to(tl.int64) * heads + head, overlap, mask=count > 0)
    factor, total, solved, other, added, is_hard = _load_solved(
        right_rows, q_high, q_size, e_size, summed, largest, hard, begin, end, first, count - 1, head, heads, rows,
        columns, IS_H, D, E, L,
    )  # fmt: skip
    for back in range(count):
        ahead = count - 1 - back
        next_factor, next_total, next_solved, next_other, next_added, next_is_hard = _load_solved(
            right_rows, q_high, q_size, e_size, summed, largest, hard, begin, end, first, ahead - 1, head, heads, rows,
            columns, IS_H, D, E, L,
        )  # fmt: skip
        index = (first + ahead).to(tl.int64) * heads + head
        before = state_base(index - heads, E, D)
        bound = _tightened(bound, state, unit, is_hard)
        if across is not None:
            forward = tl.load(high + before + place, mask=inside & (ahead > 0), other=0.0)
            S_unit = tl.load(scale + index - heads, mask=ahead > 0, other=0.0)
            tl.debug_barrier()  # what one thread overwrites another one may still read, from the turn before
            power = power_above(bound)
            state, unit = state * ratio(unit, power), power
            store_state(high, low, scale, state, unit, place, inside, index, is_hard, E, D, PRECISION)
        new_unit = _unit(added, bound)
        bound = bound * total + (2 if IS_H else 1) * L * added
        factor *= 1.0 / new_unit
        state *= total * ratio(unit, new_unit)
        left, _ = two_terms(other.to(tl.float32) * factor[:, None], PRECISION)
        state, unit = tile_product(tl.trans(left), solved, state, PRECISION), new_unit
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
        if across is not None:
            overlap = tl.sum(tl.sum(state * forward.to(tl.float32), 1), 0)
            if is_half(PRECISION):
                if is_hard:
                    low_term = tl.load(low + before + place, mask=inside & (ahead > 0), other=0.0).to(tl.float32)
                    overlap += tl.sum(tl.sum(state * low_term, 1), 0)
            tl.store(across + index - heads, overlap * unit * S_unit, mask=ahead > 0)
        factor, total, solved, other = next_factor, next_total, next_solved, next_other
        added, is_hard = next_added, next_is_hard
    if initial is not None:
        tl.store(initial + whole + place, state * unit, mask=inside)


@triton.jit
def _load_solved(
    right_rows, q_high, q_size, e_size, summed, largest, hard, begin, end, first, ahead, head, heads, rows, columns,
    IS_H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """One chunk of a sequence, empty before its start: sizes times decays from the chunk's start, the decay over the
    chunk, rows of q*, and of e* or e, the chunk's largest entry, and whether it is hard.
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
    index = (first + ahead).to(tl.int64) * heads + head
    added = tl.load(largest + index, mask=ahead >= 0, other=0.0)
    is_hard = tl.load(hard + index, mask=ahead >= 0, other=0) != 0
    return factor, tl.exp(tl.load(summed + last * heads + head)), solved, other, added, is_hard


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
