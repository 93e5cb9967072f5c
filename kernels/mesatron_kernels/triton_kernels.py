"""The Triton kernels of the Mesa operator. `triton_chunkwise` launches them and says what they compute together.

Tokens of all sequences lie in a row, N of them; each sequence is cut into chunks of L tokens, the last one shorter.
`chunks` int32 [c, 2] gives a chunk's first token and the token after its last. States are those before each chunk.

Precision. 16-bit inputs: k enters the tensor cores as it is. What is not exact in 16 bits (decayed rows, states, the
solutions) enters as two or three 16-bit terms where an inverse or a cancellation would blow up its rounding. The search
direction p of the solver is rounded to 16 bits, and everything that follows uses the rounded p, so that r stays the
true residual (see `_solve`). 32-bit inputs: every product is IEEE or three-fold TF32, by PRECISION.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A gate below this forgets everything: exp(-100) is 0 beside any other float32 of a state.
_FORGETS_ALL = tl.constexpr(-100.0)
# Squared residual of a row that float32 cannot improve; at tolerance 0 too there is nothing left to do.
_EXACT = tl.constexpr(1e-20)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b. An operand in the inputs' 16 bits is exact; one in float32 enters as two 16-bit terms."""
    if PRECISION == "bf16":
        a_high = a.to(tl.bfloat16)
        b_high = b.to(tl.bfloat16)
        acc = tl.dot(a_high, b_high, acc)
        if a.dtype == tl.float32:
            acc = tl.dot((a - a_high.to(tl.float32)).to(tl.bfloat16), b_high, acc)
        if b.dtype == tl.float32:
            acc = tl.dot(a_high, (b - b_high.to(tl.float32)).to(tl.bfloat16), acc)
    elif PRECISION == "fp16":
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="bf16x3")
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _dot_state(a, high, low, acc, PRECISION: tl.constexpr):
    """acc + a @ (high + low) for a state in two bfloat16 terms, or in one of float32 whose `low` is not looked at."""
    if (PRECISION == "bf16") or (PRECISION == "fp16"):
        a_high = a.to(tl.bfloat16)
        acc = tl.dot(a_high, high, acc)
        acc = tl.dot(a_high, low, acc)
        if a.dtype != tl.bfloat16:
            acc = tl.dot((a.to(tl.float32) - a_high.to(tl.float32)).to(tl.bfloat16), high, acc)
    else:
        acc = tl.dot(a.to(tl.float32), high, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _load_rows(pointer, tokens, valid, head, heads, columns, width: tl.constexpr):
    """Rows [L, block] of a tensor [N, heads, width]; 0 outside."""
    offsets = (tokens[:, None] * heads + head) * width + columns[None, :]
    return tl.load(pointer + offsets, mask=valid[:, None] & (columns[None, :] < width), other=0.0)


@triton.jit
def _store_rows(pointer, value, tokens, valid, head, heads, columns, width: tl.constexpr):
    offsets = (tokens[:, None] * heads + head) * width + columns[None, :]
    tl.store(
        pointer + offsets,
        value.to(pointer.dtype.element_ty),
        mask=valid[:, None] & (columns[None, :] < width),
    )


@triton.jit
def _state_offsets(slot, head, heads, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets and mask of a block of a state [slots, heads, HEIGHT, WIDTH]."""
    base = (slot.to(tl.int64) * heads + head) * HEIGHT * WIDTH
    inside = (rows[:, None] < HEIGHT) & (columns[None, :] < WIDTH)
    return base + rows[:, None] * WIDTH + columns[None, :], inside


@triton.jit
def _store_split(high, low, value, offsets, inside):
    """Store float32 `value` as the sum of two terms of the pointers' type; as one where that is float32."""
    first = value.to(high.dtype.element_ty)
    tl.store(high + offsets, first, mask=inside)
    if high.dtype.element_ty != tl.float32:
        tl.store(low + offsets, (value - first.to(tl.float32)).to(high.dtype.element_ty), mask=inside)


@triton.jit
def _load_split(high, low, offsets, inside):
    """The float32 value that `_store_split` stored."""
    value = tl.load(high + offsets, mask=inside, other=0.0).to(tl.float32)
    if high.dtype.element_ty != tl.float32:
        value += tl.load(low + offsets, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _load_chunk(chunks, chunk, L: tl.constexpr):
    """Tokens of a chunk (int64 [L]) and which of them exist."""
    begin = tl.load(chunks + 2 * chunk).to(tl.int64)
    tokens = begin + tl.arange(0, L)
    return tokens, tokens < tl.load(chunks + 2 * chunk + 1)


@triton.jit
def _decays(log_gamma, tokens, valid, head, heads):
    """Summed log gamma from the chunk's start to each token [L] and over the whole chunk."""
    gates = tl.load(log_gamma + tokens * heads + head, mask=valid, other=0.0)
    gates = tl.maximum(gates, _FORGETS_ALL)
    return tl.cumsum(gates, 0), tl.sum(gates, 0)


@triton.jit
def _between(summed, valid, gate, L: tl.constexpr):
    """gate_s zeta [t, s]: the decay from token s to token t >= s of a chunk; 0 for s > t. No exponent exceeds 0."""
    t = tl.arange(0, L)
    seen = (t[:, None] >= t[None, :]) & valid[:, None] & valid[None, :]
    return tl.where(seen, tl.exp(tl.where(seen, summed[:, None] - summed[None, :], 0.0)), 0.0) * gate[None, :]


@triton.jit
def _unit_rows(a):
    """Rows of a over their norms, and the norms; the largest entry is taken out first, so nothing underflows."""
    largest = tl.max(tl.abs(a), 1)
    a = a / tl.where(largest > 0, largest, 1.0)[:, None]
    norm = tl.sqrt(tl.sum(a * a, 1))
    return a / tl.where(norm > 0, norm, 1.0)[:, None], largest * norm


@triton.jit
def _conjugate_gradients(
    b, H_high, H_low, scale, k, weight, start, lam, max_steps, squared_tolerance,
    HARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Solve (start_t H + sum_s weight_(t,s) k_s k_s^T + Lambda) x_t = b_t for all rows of b [L, D].

    H is scale (H_high + H_low), the low term taken if HARD. Rows of b have norm 1 or 0. Starts at zero. A row stops
    when its residual norm is at most the tolerance. Returns x, squared residual norms and steps [L].
    The direction p is kept in 16 bits, scaled by `norm` to size about 1. x moves by that very p and r by its product,
    which keeps r the true residual of x.
    """
    half: tl.constexpr = (PRECISION == "bf16") or (PRECISION == "fp16")
    direction_type: tl.constexpr = tl.float16 if half else tl.float32
    keys = k.to(direction_type)
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
        if half:
            scores = tl.dot(p, tl.trans(keys)) * weight
            Ap = tl.dot(p, H_high)
            if HARD:
                Ap = tl.dot(p, H_low, Ap)
            Ap = Ap * from_start[:, None]
            scores_high = scores.to(tl.float16)
            Ap = tl.dot(scores_high, keys, Ap)
            if HARD:
                Ap = tl.dot((scores - scores_high.to(tl.float32)).to(tl.float16), keys, Ap)
        else:
            scores = tl.dot(p, tl.trans(keys), input_precision=PRECISION) * weight
            Ap = tl.dot(p, H_high, input_precision=PRECISION) * from_start[:, None]
            Ap = tl.dot(scores, keys, Ap, input_precision=PRECISION)
        direction = p.to(tl.float32)
        Ap += direction * lam[None, :]
        pAp = tl.sum(direction * Ap, 1)
        # r . p is rr * norm but for the rounding of p: r is orthogonal to the direction before.
        before = rr * norm
        alpha = tl.where(pAp > 0, before / tl.where(pAp > 0, pAp, 1.0), 0.0)
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


@triton.jit
def _load_H(
    H_high, H_low, H_scale, H_norms, slot, head, heads, hard_norm,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Both terms of the state H, their scale, and whether its norm makes the low term matter (else that is 0)."""
    index = slot.to(tl.int64) * heads + head
    scale = tl.load(H_scale + index)
    squared = 0.0
    for tile in tl.static_range(TILES):
        squared += tl.load(H_norms + index * TILES + tile)
    hard = squared > hard_norm * hard_norm
    columns = tl.arange(0, BLOCK_D)
    offsets, inside = _state_offsets(slot, head, heads, columns, columns, D, D)
    high = tl.load(H_high + offsets, mask=inside, other=0.0)
    low = high
    if high.dtype != tl.float32:
        low = tl.load(H_low + offsets, mask=inside & hard, other=0.0)
    return high, low, scale, hard


@triton.jit
def forward_states(
    k,  # [N, heads, D]
    w,  # [N, heads, E]: k for the state H, v for the state G
    log_gamma,  # [N, heads] float32
    beta,  # [N, heads] float32
    initial,  # [sequences, heads, E, D] float32, if HAS_INITIAL
    high,  # [c, heads, E, D] of the states' type, written
    low,  # [c, heads, E, D] of the states' type, written
    scale,  # [c, heads] float32, written if SCALED: the state is scale (high + low)
    norms,  # [c, heads, E / BLOCK_E] float32, written if SCALED: each block's squared norm
    final,  # [sequences, heads, E, D] float32, written
    chunks,  # [c, 2] int32
    first_chunk,  # [sequences + 1] int32
    heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Decayed sums of beta w k^T before every chunk and after the last, BLOCK_E rows of one head per program.

    SCALED (for H) brings entries into float16's range by a power of two above the trace, which bounds them all.
    """
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    columns = tl.arange(0, BLOCK_D)
    state = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    trace = 0.0
    own_offsets, own = _state_offsets(sequence, head, heads, rows, columns, E, D)
    if HAS_INITIAL:
        state = tl.load(initial + own_offsets, mask=own, other=0.0)
        if SCALED:
            diagonal = (sequence.to(tl.int64) * heads + head) * D * D + columns * (D + 1)
            trace = tl.sum(tl.load(initial + diagonal, mask=columns < D, other=0.0), 0)
    first, last = tl.load(first_chunk + sequence), tl.load(first_chunk + sequence + 1)
    for ahead in range(last - first):
        chunk = first + ahead
        tokens, valid = _load_chunk(chunks, chunk, L)
        offsets, inside = _state_offsets(chunk, head, heads, rows, columns, E, D)
        if SCALED:
            power = tl.exp2(tl.ceil(tl.log2(tl.maximum(trace, 1e-30))))
            _store_split(high, low, state / power, offsets, inside)
            index = chunk.to(tl.int64) * heads + head
            tl.store(scale + index, power)
            squared = tl.sum(tl.sum(state * state, 1), 0)
            tl.store(norms + index * tl.num_programs(1) + tl.program_id(1), squared)
        else:
            _store_split(high, low, state, offsets, inside)
        summed, total = _decays(log_gamma, tokens, valid, head, heads)
        gate = tl.load(beta + tokens * heads + head, mask=valid, other=0.0) * tl.exp(total - summed)
        keys = _load_rows(k, tokens, valid, head, heads, columns, D)
        values = _load_rows(w, tokens, valid, head, heads, rows, E).to(tl.float32) * gate[:, None]
        state = state * tl.exp(total)
        if SCALED and ((PRECISION == "bf16") or (PRECISION == "fp16")):
            # Keys of norm 1 fit float16, whose two terms hold H to 2^-22: bfloat16's 2^-17 can outweigh Lambda.
            first_term = values.to(tl.float16)
            keys_half = keys.to(tl.float16)
            state = tl.dot(tl.trans(first_term), keys_half, state)
            state = tl.dot(tl.trans((values - first_term.to(tl.float32)).to(tl.float16)), keys_half, state)
        else:
            state = _dot(tl.trans(values), keys, state, PRECISION)
        if SCALED:
            lengths = tl.sum(keys.to(tl.float32) * keys.to(tl.float32), 1)
            trace = trace * tl.exp(total) + tl.sum(lengths * gate, 0)
    tl.store(final + own_offsets, state, mask=own)


@triton.jit
def solve(
    b,  # [N, heads, D]: q, or in the backward pass G^T e in float32
    k,  # [N, heads, D]
    log_gamma,  # [N, heads] float32
    beta,  # [N, heads] float32
    lam,  # [heads, D] float32
    H_high, H_low,  # [c, heads, D, D] float16 or float32
    H_scale,  # [c, heads] float32
    H_norms,  # [c, heads, TILES] float32
    chunks,  # [c, 2] int32
    x,  # [N, heads, D] float32, written: (H + Lambda)^-1 b
    steps,  # [N, heads] int32, written if not ADJOINT
    residual,  # [N, heads] float32, written if not ADJOINT
    q_star,  # [N, heads, D] float32, if ADJOINT, as all that follow
    dq,  # [N, heads, D], written: x in q's type
    row_sums,  # [N, heads] float32, written: x . Lambda q_star, the sum over s of all that token t saw
    dlam,  # [c, heads, D] float32, written: each chunk's part
    heads,
    max_steps,
    tolerance,
    hardness,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    L: tl.constexpr,
    TILES: tl.constexpr,
    ADJOINT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Solve for one chunk of one head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, valid = _load_chunk(chunks, chunk, L)
    columns = tl.arange(0, BLOCK_D)
    summed, _ = _decays(log_gamma, tokens, valid, head, heads)
    weight = _between(summed, valid, tl.load(beta + tokens * heads + head, mask=valid, other=0.0), L)
    start = tl.exp(summed)
    keys = _load_rows(k, tokens, valid, head, heads, columns, D)
    sides, norm = _unit_rows(_load_rows(b, tokens, valid, head, heads, columns, D).to(tl.float32))
    regular = tl.load(lam + head * D + columns, mask=columns < D, other=1.0)
    hard_norm = hardness * tl.min(tl.where(columns < D, regular, float("inf")), 0)
    high, low, scale, hard = _load_H(H_high, H_low, H_scale, H_norms, chunk, head, heads, hard_norm, D, BLOCK_D, TILES)
    if hard:
        solution, rr, taken = _conjugate_gradients(
            sides, high, low, scale, keys, weight, start, regular, max_steps, tolerance * tolerance, True, PRECISION
        )
    else:
        solution, rr, taken = _conjugate_gradients(
            sides, high, low, scale, keys, weight, start, regular, max_steps, tolerance * tolerance, False, PRECISION
        )
    solution *= norm[:, None]
    _store_rows(x, solution, tokens, valid, head, heads, columns, D)
    if ADJOINT:
        _store_rows(dq, solution, tokens, valid, head, heads, columns, D)
        products = solution * _load_rows(q_star, tokens, valid, head, heads, columns, D)
        tl.store(row_sums + tokens * heads + head, tl.sum(products * regular[None, :], 1), mask=valid)
        offset = (chunk.to(tl.int64) * heads + head) * D + columns
        tl.store(dlam + offset, -tl.sum(products, 0), mask=columns < D)
    else:
        tl.store(steps + tokens * heads + head, taken, mask=valid)
        tl.store(residual + tokens * heads + head, tl.sqrt(rr), mask=valid)


@triton.jit
def read_out(
    x,  # [N, heads, D]: q_star in float32, or e to read out by the transpose
    k,  # [N, heads, D]
    v,  # [N, heads, E]
    log_gamma,  # [N, heads] float32
    beta,  # [N, heads] float32
    G_high, G_low,  # [c, heads, E, D] bfloat16 or float32
    chunks,  # [c, 2] int32
    y,  # written: [N, heads, E], or with TRANSPOSED [N, heads, D] in float32
    heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y = G x, or G^T x if TRANSPOSED, for one chunk of one head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, valid = _load_chunk(chunks, chunk, L)
    columns, values = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    summed, _ = _decays(log_gamma, tokens, valid, head, heads)
    gate = tl.load(beta + tokens * heads + head, mask=valid, other=0.0)
    offsets, inside = _state_offsets(chunk, head, heads, values, columns, E, D)
    high = tl.load(G_high + offsets, mask=inside, other=0.0)
    low = tl.load(G_low + offsets, mask=inside, other=0.0)
    keys = _load_rows(k, tokens, valid, head, heads, columns, D)
    seen = _load_rows(v, tokens, valid, head, heads, values, E)
    if TRANSPOSED:
        rows = _load_rows(x, tokens, valid, head, heads, values, E)
        result = _dot_state(rows, high, low, tl.zeros([L, BLOCK_D], tl.float32), PRECISION)
        scores = _dot(rows, tl.trans(seen), tl.zeros([L, L], tl.float32), PRECISION)
        result *= tl.exp(summed)[:, None]
        result = _dot(scores * _between(summed, valid, gate, L), keys, result, PRECISION)
        _store_rows(y, result, tokens, valid, head, heads, columns, D)
    else:
        rows = _load_rows(x, tokens, valid, head, heads, columns, D)
        result = _dot_state(rows, tl.trans(high), tl.trans(low), tl.zeros([L, BLOCK_E], tl.float32), PRECISION)
        scores = _dot(rows, tl.trans(keys), tl.zeros([L, L], tl.float32), PRECISION)
        result *= tl.exp(summed)[:, None]
        result = _dot(scores * _between(summed, valid, gate, L), seen, result, PRECISION)
        _store_rows(y, result, tokens, valid, head, heads, values, E)


@triton.jit
def backward_states(
    a,  # [N, heads, E]: q_star for the cotangent of H, e for that of G
    b,  # [N, heads, D]: e_star or q_star, float32
    log_gamma,  # [N, heads] float32
    final,  # [sequences, heads, E, D] float32: cotangent after the last chunk, if HAS_FINAL
    high, low,  # [c, heads, E, D] bfloat16 or float32, written: cotangent after each chunk
    initial,  # [sequences, heads, E, D] float32, written: cotangent before the first chunk
    S_high, S_low,  # [c, heads, E, D]: the forward state before each chunk
    S_scale,  # [c, heads] float32, if SCALED
    S_final,  # [sequences, heads, E, D] float32: the forward state after the last chunk
    across,  # [c, heads, blocks] float32, written: cotangent . forward state after each chunk, each block's part
    chunks,  # [c, 2] int32
    first_chunk,  # [sequences + 1] int32
    heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    L: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of a b^T (or a b^T + b a^T) decayed backwards in time, BLOCK_E rows of one head per program."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    columns = tl.arange(0, BLOCK_D)
    state = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    own_offsets, own = _state_offsets(sequence, head, heads, rows, columns, E, D)
    if HAS_FINAL:
        state = tl.load(final + own_offsets, mask=own, other=0.0)
    first, last = tl.load(first_chunk + sequence), tl.load(first_chunk + sequence + 1)
    forward = tl.load(S_final + own_offsets, mask=own, other=0.0)
    for back in range(last - first):
        chunk = last - 1 - back
        tokens, valid = _load_chunk(chunks, chunk, L)
        offsets, inside = _state_offsets(chunk, head, heads, rows, columns, E, D)
        _store_split(high, low, state, offsets, inside)
        index = chunk.to(tl.int64) * heads + head
        overlap = tl.sum(tl.sum(state * forward, 1), 0)
        tl.store(across + index * tl.num_programs(1) + tl.program_id(1), overlap)
        forward = _load_split(S_high, S_low, offsets, inside)
        if SCALED:
            forward *= tl.load(S_scale + index)
        summed, total = _decays(log_gamma, tokens, valid, head, heads)
        decay = tl.exp(summed)[:, None]
        left = _load_rows(a, tokens, valid, head, heads, rows, E).to(tl.float32) * decay
        right = _load_rows(b, tokens, valid, head, heads, columns, D)
        state = _dot(tl.trans(left), right, state * tl.exp(total), PRECISION)
        if SYMMETRIC:
            left = _load_rows(b, tokens, valid, head, heads, rows, D) * decay
            right = _load_rows(a, tokens, valid, head, heads, columns, D)
            state = _dot(tl.trans(left), right, state, PRECISION)
    tl.store(initial + own_offsets, state, mask=own)


@triton.jit
def backward_inputs(
    k,  # [N, heads, D]
    v,  # [N, heads, E]
    log_gamma,  # [N, heads] float32
    beta,  # [N, heads] float32
    q_star,  # [N, heads, D] float32
    e_star,  # [N, heads, D] float32
    e,  # [N, heads, E]
    dH_high, dH_low,  # [c, heads, D, D]: minus twice the cotangent of H after the chunk
    dG_high, dG_low,  # [c, heads, E, D]: cotangent of G after the chunk
    chunks,  # [c, 2] int32
    dk,  # [N, heads, D], written
    dv,  # [N, heads, E], written
    dbeta_parts,  # [blocks, N, heads] float32, written: each block of columns' part
    tokens_in_all,  # N
    heads,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    COLUMNS: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of k and v, COLUMNS columns of both, and a part of that of beta, for one chunk of one head.

    Matrices over (s, t) are formed in that order from the start: a transposed product is what Triton 3.4 to 3.7.0
    miscompile on Hopper.
    """
    chunk, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens, valid = _load_chunk(chunks, chunk, L)
    columns, values = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    own = block * COLUMNS + tl.arange(0, COLUMNS)
    summed, total = _decays(log_gamma, tokens, valid, head, heads)
    to_end = tl.exp(total - summed)
    gate = tl.load(beta + tokens * heads + head, mask=valid, other=0.0)
    keys = _load_rows(k, tokens, valid, head, heads, columns, D)
    seen = _load_rows(v, tokens, valid, head, heads, values, E)

    # What comes from after the chunk, by the cotangents of the states at its end.
    offsets, inside = _state_offsets(chunk, head, heads, values, own, E, D)
    high = tl.load(dG_high + offsets, mask=inside, other=0.0)
    low = tl.load(dG_low + offsets, mask=inside, other=0.0)
    dkeys = _dot_state(seen, high, low, tl.zeros([L, COLUMNS], tl.float32), PRECISION)
    offsets, inside = _state_offsets(chunk, head, heads, columns, own, D, D)
    high = tl.load(dH_high + offsets, mask=inside, other=0.0)
    low = tl.load(dH_low + offsets, mask=inside, other=0.0)
    curved = _dot_state(keys, high, low, tl.zeros([L, COLUMNS], tl.float32), PRECISION)
    own_keys = _load_rows(k, tokens, valid, head, heads, own, D).to(tl.float32)
    gate_gradient = tl.sum((dkeys - 0.5 * curved) * own_keys, 1) * to_end
    dkeys = (dkeys - curved) * to_end[:, None]

    # What comes from within the chunk.
    solved = _load_rows(q_star, tokens, valid, head, heads, columns, D)
    key_query = _dot(keys, tl.trans(solved), tl.zeros([L, L], tl.float32), PRECISION)
    adjoint = _load_rows(e_star, tokens, valid, head, heads, columns, D)
    gain = _dot(keys, tl.trans(-adjoint), tl.zeros([L, L], tl.float32), PRECISION)
    incoming = _load_rows(e, tokens, valid, head, heads, values, E)
    gain = _dot(seen, tl.trans(incoming), gain, PRECISION)
    s = tl.arange(0, L)
    later = (s[None, :] >= s[:, None]) & valid[:, None] & valid[None, :]
    decay = tl.where(later, tl.exp(tl.where(later, summed[None, :] - summed[:, None], 0.0)), 0.0)
    key_query *= decay
    if block == 0:
        gate_gradient += tl.sum(key_query * gain, 1)
    tl.store(dbeta_parts + (block.to(tl.int64) * tokens_in_all + tokens) * heads + head, gate_gradient, mask=valid)
    own_solved = _load_rows(q_star, tokens, valid, head, heads, own, D)
    dkeys = _dot(gain * decay, own_solved, dkeys, PRECISION)
    own_adjoint = _load_rows(e_star, tokens, valid, head, heads, own, D)
    dkeys = _dot(-key_query, own_adjoint, dkeys, PRECISION)
    _store_rows(dk, dkeys * gate[:, None], tokens, valid, head, heads, own, D)

    offsets, inside = _state_offsets(chunk, head, heads, own, columns, E, D)
    high = tl.load(dG_high + offsets, mask=inside, other=0.0)
    low = tl.load(dG_low + offsets, mask=inside, other=0.0)
    dvalues = _dot_state(keys, tl.trans(high), tl.trans(low), tl.zeros([L, COLUMNS], tl.float32), PRECISION)
    dvalues *= to_end[:, None]
    own_incoming = _load_rows(e, tokens, valid, head, heads, own, E)
    dvalues = _dot(key_query, own_incoming, dvalues, PRECISION)
    _store_rows(dv, dvalues * gate[:, None], tokens, valid, head, heads, own, E)


@triton.jit
def backward_gates(
    log_gamma,  # [N, heads] float32
    beta,  # [N, heads] float32
    row_sums,  # [N, heads] float32
    dbeta_parts,  # [blocks, N, heads] float32
    across_H, across_G,  # [c, heads, parts] float32: cotangents . states after the chunk
    chunks,  # [c, 2] int32
    dlog_gamma,  # [N, heads] float32, written
    dbeta,  # [N, heads] float32, written
    tokens_in_all,  # N
    heads,
    BLOCKS: tl.constexpr,
    PARTS_H: tl.constexpr,
    PARTS_G: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """Gradients of both gates for one chunk of all heads.

    gamma_s scales every pair of a reader t >= s and a token before s: all that this chunk's readers t >= s saw, less
    what anyone saw of this chunk's tokens >= s, plus what readers after the chunk saw of it and all before.
    """
    chunk = tl.program_id(0)
    tokens, valid = _load_chunk(chunks, chunk, L)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    inside = valid[:, None] & (head[None, :] < heads)
    offsets = tokens[:, None] * heads + head[None, :]
    gradient = tl.zeros([L, BLOCK_HEADS], tl.float32)
    for block in tl.static_range(BLOCKS):
        part = dbeta_parts + block * tokens_in_all.to(tl.int64) * heads
        gradient += tl.load(part + offsets, mask=inside, other=0.0)
    tl.store(dbeta + offsets, gradient, mask=inside)
    beyond = tl.zeros([BLOCK_HEADS], tl.float32)
    index = chunk.to(tl.int64) * heads + head
    for part in tl.static_range(PARTS_G):
        beyond += tl.load(across_G + index * PARTS_G + part, mask=head < heads, other=0.0)
    for part in tl.static_range(PARTS_H):
        beyond -= 0.5 * tl.load(across_H + index * PARTS_H + part, mask=head < heads, other=0.0)
    sums = tl.load(row_sums + offsets, mask=inside, other=0.0)
    sums -= gradient * tl.load(beta + offsets, mask=inside, other=0.0)
    later = tl.sum(sums, 0)[None, :] - tl.cumsum(sums, 0) + sums
    # What forgets all stays forgetting all: rounding must not look like a gradient there.
    moves = tl.load(log_gamma + offsets, mask=inside, other=0.0) > _FORGETS_ALL
    tl.store(dlog_gamma + offsets, tl.where(moves, later + beyond[None, :], 0.0), mask=inside)
