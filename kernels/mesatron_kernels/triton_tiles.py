"""What the Triton kernels share: how tokens, states and products of tiles are read, written and formed.

Tokens of all sequences lie in a row, N of them; each sequence is cut into chunks of L tokens, the last one shorter.

Precision. Where inputs have 16 bits, k is taken in float16, and whatever is not exact in 16 bits (states, solutions,
decayed rows) as two float16 terms times a power of two, 22 bits together. The low term counts, and is written, only in
chunks that are hard: where the norm of H exceeds `hardness` times the smallest Lambda, so that the inverse could blow
the rounding of the high term up. 32-bit inputs: one float32 term, and every product is IEEE or three-fold TF32, by
PRECISION.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies 16-bit tiles wrongly; it gets the same values in float32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# A gate below this forgets everything: exp(-100) is 0 beside any other float32 of a state.
FORGETS_ALL = tl.constexpr(-100.0)


@triton.constexpr_function
def is_half(precision):
    """Whether inputs have 16 bits."""
    return precision in ("bf16", "fp16")


@triton.jit
def tile_product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b for tiles of one type: 16 bits, or float32 multiplied by PRECISION."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def product(a_high, a_low, b, acc, HARD: tl.constexpr, PRECISION: tl.constexpr):
    """acc + (a_high + a_low) @ b; the low term counts if HARD."""
    acc = tile_product(a_high, b, acc, PRECISION)
    if HARD and (a_high.dtype != tl.float32):
        acc = tile_product(a_low, b, acc, PRECISION)
    return acc


@triton.jit
def input_product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b for rows b of v or of o's gradient, and a in float32, which enters as two terms of their type."""
    if PRECISION == "bf16":
        for _ in tl.static_range(2):
            term = a.to(tl.bfloat16)
            acc = tile_product(term, b, acc, PRECISION)
            a -= term.to(tl.float32)
    elif (PRECISION == "fp16") and not INTERPRETED:
        acc = tl.dot(a, b.to(tl.float32), acc, input_precision="bf16x3")
    else:
        acc = tile_product(a, b.to(tl.float32), acc, PRECISION)
    return acc


@triton.jit
def two_terms(a, PRECISION: tl.constexpr):
    """float32 a, of entries up to about 1, as two float16 terms; as it is where products take 32 bits."""
    if is_half(PRECISION):
        high = a.to(tl.float16)
        low = (a - high.to(tl.float32)).to(tl.float16)
    else:
        high = a
        low = a
    return high, low


@triton.jit
def power_above(size):
    """A power of two at or above `size` (above 0), or so near below that twice as much still fits."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(size, 1e-36))))


@triton.jit
def scaled_rows(a):
    """Rows of a over a power of two near their largest entry, and that power [L]; a row of zeros stays."""
    power = power_above(tl.max(tl.abs(a), 1))
    return a * (1.0 / power)[:, None], power


@triton.jit
def load_chunk(chunks, chunk, length, per_sequence, L: tl.constexpr):
    """Tokens of a chunk (int64 [L]), and which of them exist.

    `chunks` int32 [c, 2] gives the first token and the token after the last; without it sequences have `length` tokens
    and `per_sequence` chunks each.
    """
    if chunks is None:
        begin = (chunk // per_sequence).to(tl.int64) * length + (chunk % per_sequence) * L
        end = (chunk // per_sequence + 1).to(tl.int64) * length
    else:
        begin = tl.load(chunks + 2 * chunk).to(tl.int64)
        end = tl.load(chunks + 2 * chunk + 1).to(tl.int64)
    tokens = begin + tl.arange(0, L)
    return tokens, tokens < end


@triton.jit
def load_gates(beta, summed, tokens, valid, head, heads):
    """beta [L], and log gamma summed from the chunk's start to each token [L]."""
    offsets = tokens * heads + head
    gate = tl.load(beta + offsets, mask=valid, other=0.0)
    return gate, tl.load(summed + offsets, mask=valid, other=0.0)


@triton.jit
def load_rows(pointer, tokens, valid, head, heads, columns, width: tl.constexpr):
    """Rows [L, block] of a tensor [N, heads, width]; 0 outside."""
    offsets = (tokens[:, None] * heads + head) * width + columns[None, :]
    return tl.load(pointer + offsets, mask=valid[:, None] & (columns[None, :] < width), other=0.0)


@triton.jit
def as_keys(rows, PRECISION: tl.constexpr):
    """Rows of k as products take them."""
    if is_half(PRECISION):
        rows = rows.to(tl.float16)
    return rows


@triton.jit
def load_keys(k, tokens, valid, head, heads, columns, D: tl.constexpr, PRECISION: tl.constexpr):
    """Rows [L, block] of k as products take them; 0 outside."""
    return as_keys(load_rows(k, tokens, valid, head, heads, columns, D), PRECISION)


@triton.jit
def store_rows(pointer, value, tokens, valid, head, heads, columns, width: tl.constexpr):
    """Store rows [L, block] into a tensor [N, heads, width]."""
    offsets = (tokens[:, None] * heads + head) * width + columns[None, :]
    value = value.to(pointer.dtype.element_ty)
    tl.store(pointer + offsets, value, mask=valid[:, None] & (columns[None, :] < width))


@triton.jit
def load_sizes(size, tokens, valid, head, heads):
    """What solved rows (`store_solution`) are to be multiplied by [L]."""
    return tl.load(size + tokens * heads + head, mask=valid, other=0.0)


@triton.jit
def store_solution(
    high, low, size, x, norm, tokens, valid, head, heads, columns,
    width: tl.constexpr, HARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store rows x [L, D] times `norm` [L] as two terms and a factor; returns the terms."""
    x, power = scaled_rows(x)
    first, second = two_terms(x, PRECISION)
    store_rows(high, first, tokens, valid, head, heads, columns, width)
    if HARD and (first.dtype != tl.float32):
        store_rows(low, second, tokens, valid, head, heads, columns, width)
    tl.store(size + tokens * heads + head, power * norm, mask=valid)
    return first, second, power


@triton.jit
def ratio(power, other):
    """power / other of two powers of two; so large a one that it is not finite stands for what has been lost."""
    return tl.minimum(power / other, 1e38)


@triton.jit
def state_base(index, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Where a state of [slots, heads, HEIGHT, WIDTH] begins; `index` is slot * heads + head, int64."""
    return index * (HEIGHT * WIDTH)


@triton.jit
def state_places(rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of a block within a state, and which of its entries exist."""
    return rows[:, None] * WIDTH + columns[None, :], (rows[:, None] < HEIGHT) & (columns[None, :] < WIDTH)


@triton.jit
def load_state(term, index, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """A block of one term of a state, still to be multiplied by its scale."""
    place, inside = state_places(rows, columns, HEIGHT, WIDTH)
    return tl.load(term + state_base(index, HEIGHT, WIDTH) + place, mask=inside, other=0.0)


@triton.jit
def store_state(
    high, low, scale, state, unit, place, inside, index, hard,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store `state` in two terms, the low one if the chunk is hard, and `unit`, their scale."""
    base = state_base(index, HEIGHT, WIDTH)
    first, _ = two_terms(state, PRECISION)
    tl.store(high + base + place, first, mask=inside)
    if is_half(PRECISION):
        if hard:
            _, second = two_terms(state, PRECISION)
            tl.store(low + base + place, second, mask=inside)
    tl.store(scale + index, unit)


@triton.jit
def decays_within(to_token, valid, gate, L: tl.constexpr):
    """gate_s zeta [t, s]: the decay from token s to token t >= s of a chunk; 0 for s > t. No exponent exceeds 0."""
    t = tl.arange(0, L)
    seen = (t[:, None] >= t[None, :]) & valid[:, None] & valid[None, :]
    return tl.where(seen, tl.exp(tl.where(seen, to_token[:, None] - to_token[None, :], 0.0)), 0.0) * gate[None, :]
