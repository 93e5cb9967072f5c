"""Triton kernels of `decay`.

`weighted_products`, of bf16 tensors: these are read once, as they are, and products are formed on tensor cores. What is
not exact in bf16 enters as two terms of it, 16 bits together. `run_decays`: sums in float64, of one head in a program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from mesatron_kernels.triton_tiles import tile_product
from torch import Tensor
from torch.autograd.function import once_differentiable

# A sum of several products stays in the registers where it is only if its rows fill the program's warps, 16 each: else
# Triton gives the last product another layout than those before, and moves the sum through shared memory every time.
FORWARD_L, FORWARD_ROWS = 32, 128  # tokens and channels of v that a program multiplies at a time, the rows of its sum
BACKWARD_L, BACKWARD_ROWS = 64, 32  # here tokens are the rows
LARGEST_D = 128  # with which these fit the shared memory of consumer cards
SHORTEST_PART = 512  # tokens: fewer would cost more in adding parts up than they gain
PROGRAMS = 256  # that fill a GPU
LONGEST_SCAN = 4096  # tokens that a program adds up at a time


@triton.jit
def products_forward(
    v, k,  # [B, T, heads, E or D] bf16
    weights,  # [B, T, heads] fp32
    sums,  # [parts, B, heads, E or D + E, D] fp32, written
    T, heads, part_length,
    E: tl.constexpr, D: tl.constexpr, SQUARES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """The sum over one part of the tokens, for a block of rows of one head: of v k^T, or below those of k k^T."""
    row, part, block = tl.program_id(0), tl.program_id(2), tl.program_id(1)
    batch, head = (row // heads).to(tl.int64), row % heads
    factor, width, above = v, E, 0
    if SQUARES:
        if block < tl.cdiv(D, BLOCK_E):
            factor, width = k, D
        else:
            block, above = block - tl.cdiv(D, BLOCK_E), D
    rows, columns = block * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    end = tl.minimum((part + 1) * part_length, T)
    acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    for begin in range(part * part_length, end, L):
        tokens = begin + tl.arange(0, L)
        places, valid = (batch * T + tokens) * heads + head, tokens < end
        weight = tl.load(weights + places, mask=valid, other=0.0)
        keys = tl.load(
            k + places[:, None] * D + columns[None, :], mask=valid[:, None] & (columns[None, :] < D), other=0.0
        )
        value_mask = valid[:, None] & (rows[None, :] < width)
        values = tl.load(factor + places[:, None] * width + rows[None, :], mask=value_mask, other=0.0)
        weighted = keys.to(tl.float32) * weight[:, None]
        high = weighted.to(tl.bfloat16)
        acc = tile_product(tl.trans(values), high, acc, "bf16")
        acc = tile_product(tl.trans(values), (weighted - high.to(tl.float32)).to(tl.bfloat16), acc, "bf16")
    base = (part * tl.num_programs(0) + row).to(tl.int64) * (E + SQUARES * D) * D
    place = (above + rows[:, None]) * D + columns[None, :]
    tl.store(sums + base + place, acc, mask=(rows[:, None] < width) & (columns[None, :] < D))


@triton.jit
def load_terms(high, low, base, rows, columns, HEIGHT: tl.constexpr, D: tl.constexpr):
    """Some rows of one head's matrix of this height, as two terms."""
    place, inside = base + rows[:, None] * D + columns[None, :], (rows[:, None] < HEIGHT) & (columns[None, :] < D)
    return tl.load(high + place, mask=inside, other=0.0), tl.load(low + place, mask=inside, other=0.0)


@triton.jit
def products_backward(
    v, k, weights,
    high, low,  # [B, heads, E or D + E, D] bf16: the sums' gradient in two terms, that of squares plus its transpose
    dv, dk, dweights,  # written
    T, heads,
    E: tl.constexpr, D: tl.constexpr, SQUARES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Gradients of some tokens of one head."""
    row = tl.program_id(0)
    batch, head = (row // heads).to(tl.int64), row % heads
    tokens, columns = tl.program_id(1) * L + tl.arange(0, L), tl.arange(0, BLOCK_D)
    places, valid = (batch * T + tokens) * heads + head, tokens < T
    weight = tl.load(weights + places, mask=valid, other=0.0)
    key_places, key_mask = places[:, None] * D + columns[None, :], valid[:, None] & (columns[None, :] < D)
    keys = tl.load(k + key_places, mask=key_mask, other=0.0)
    gradient = tl.zeros([L, BLOCK_D], tl.float32)  # of the weighted keys
    base = row.to(tl.int64) * (E + SQUARES * D) * D
    twice = tl.zeros([L], tl.float32)
    if SQUARES:
        for first in range(0, D, BLOCK_E):
            rows = first + tl.arange(0, BLOCK_E)
            value_places, value_mask = places[:, None] * D + rows[None, :], valid[:, None] & (rows[None, :] < D)
            values = tl.load(k + value_places, mask=value_mask, other=0.0)
            first_term, second_term = load_terms(high, low, base, rows, columns, D, D)
            gradient = tile_product(values, first_term, gradient, "bf16")
            gradient = tile_product(values, second_term, gradient, "bf16")
        # The weight of k k^T would get this twice, from the gradient and from its transpose.
        twice = 0.5 * tl.sum(gradient * keys.to(tl.float32), 1)
        base += D * D
    for first in range(0, E, BLOCK_E):
        rows = first + tl.arange(0, BLOCK_E)
        value_places, value_mask = places[:, None] * E + rows[None, :], valid[:, None] & (rows[None, :] < E)
        values = tl.load(v + value_places, mask=value_mask, other=0.0)
        first_term, second_term = load_terms(high, low, base, rows, columns, E, D)
        gradient = tile_product(values, first_term, gradient, "bf16")
        gradient = tile_product(values, second_term, gradient, "bf16")
        of_values = tile_product(keys, tl.trans(first_term), tl.zeros([L, BLOCK_E], tl.float32), "bf16")
        of_values = tile_product(keys, tl.trans(second_term), of_values, "bf16") * weight[:, None]
        tl.store(dv + value_places, of_values.to(dv.dtype.element_ty), mask=value_mask)
    tl.store(dweights + places, tl.sum(gradient * keys.to(tl.float32), 1) - twice, mask=valid)
    gradient *= weight[:, None]
    tl.store(dk + key_places, gradient.to(dk.dtype.element_ty), mask=key_mask)


class WeightedProducts(torch.autograd.Function):
    """v [B, T, h, E] and k [B, T, h, D], bf16, and weights, fp32 [B, T, h], to the fp32 sums [B, h, E, D] of v k^T, and
    with `squares` [B, h, D + E, D], those of k k^T first."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, k: Tensor, weights: Tensor, squares: bool) -> Tensor:
        v, k, weights = v.contiguous(), k.contiguous(), weights.contiguous()
        ctx.save_for_backward(v, k, weights)
        ctx.squares = squares
        batch, T, heads, D = k.shape
        E = v.shape[-1]
        launch = sizes(E, D, squares, products_forward)
        blocks = triton.cdiv(E, launch["BLOCK_E"]) + squares * triton.cdiv(D, launch["BLOCK_E"])
        wanted = triton.cdiv(PROGRAMS, batch * heads * blocks)
        part_length = max(SHORTEST_PART, launch["L"] * triton.cdiv(T, wanted * launch["L"]))
        parts = triton.cdiv(T, part_length)
        sums = weights.new_empty(parts, batch, heads, E + squares * D, D)
        products_forward[(batch * heads, blocks, parts)](v, k, weights, sums, T, heads, part_length, **launch)
        return sums[0] if parts == 1 else sums.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor | None, ...]:
        v, k, weights = ctx.saved_tensors
        dv, dk, dweights = torch.empty_like(v), torch.empty_like(k), torch.empty_like(weights)
        batch, T, heads, D = k.shape
        if ctx.squares:
            of_squares, of_products = dsums.split([D, v.shape[-1]], -2)
            dsums = torch.cat([of_squares + of_squares.mT, of_products], -2)
        dsums = dsums.contiguous()
        high = dsums.to(k.dtype)
        low = (dsums - high).to(k.dtype)
        launch = sizes(v.shape[-1], D, ctx.squares, products_backward)
        products_backward[(batch * heads, triton.cdiv(T, launch["L"]))](
            v, k, weights, high, low, dv, dk, dweights, T, heads, **launch
        )
        return dv, dk, dweights, None


def sizes(E: int, D: int, squares: bool, kernel: Any) -> dict[str, int]:
    """How a kernel is launched for heads of so many channels."""
    if kernel is products_forward:
        rows = min(FORWARD_ROWS, max(64, triton.next_power_of_2(E)))
        tile = {"L": FORWARD_L, "BLOCK_E": rows, "num_warps": rows // 16, "num_stages": 3}
    else:
        stages = 2 if D <= LARGEST_D else 1
        tile = {"L": BACKWARD_L, "BLOCK_E": BACKWARD_ROWS, "num_warps": BACKWARD_L // 16, "num_stages": stages}
    return {"E": E, "D": D, "SQUARES": int(squares), "BLOCK_D": max(64, triton.next_power_of_2(D))} | tile


@triton.jit
def decays_forward(
    log_gamma,  # [B, T, heads] fp32
    after,  # [B, T, heads] fp32, written: sums of all later entries
    total,  # [B, heads] fp32, written
    T, heads, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = (row // heads).to(tl.int64) * T * heads + row % heads
    seen = tl.cast(0.0, tl.float64)
    for begin in range(0, T, BLOCK):
        later = T - begin - tl.arange(0, BLOCK)  # from the end on; the first is beyond it and adds nothing
        gates = tl.load(log_gamma + base + later * heads, mask=(later > 0) & (later < T), other=0.0).to(tl.float64)
        sums = seen + tl.cumsum(gates, 0)
        tl.store(after + base + (later - 1) * heads, sums.to(tl.float32), mask=later > 0)
        seen += tl.sum(gates, 0)
    tl.store(total + row, (seen + tl.load(log_gamma + base)).to(tl.float32))


@triton.jit
def decays_backward(
    dafter, dtotal,  # as after and total
    dlog_gamma,  # [B, T, heads] fp32, written
    T, heads, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    base = (row // heads).to(tl.int64) * T * heads + row % heads
    seen = tl.load(dtotal + row).to(tl.float64)
    for begin in range(0, T, BLOCK):
        tokens = begin + tl.arange(0, BLOCK)
        earlier = tl.load(dafter + base + (tokens - 1) * heads, mask=(tokens > 0) & (tokens < T), other=0.0)
        sums = seen + tl.cumsum(earlier.to(tl.float64), 0)
        tl.store(dlog_gamma + base + tokens * heads, sums.to(tl.float32), mask=tokens < T)
        seen += tl.sum(earlier.to(tl.float64), 0)


class RunDecays(torch.autograd.Function):
    """log_gamma, fp32 [B, T, h], to the sums of all later entries [B, T, h] and of all [B, h]."""

    @staticmethod
    def forward(ctx: Any, log_gamma: Tensor) -> tuple[Tensor, Tensor]:
        log_gamma = log_gamma.contiguous()
        batch, T, heads = log_gamma.shape
        after, total = torch.empty_like(log_gamma), log_gamma.new_empty(batch, heads)
        decays_forward[(batch * heads,)](log_gamma, after, total, T, heads, **scan(T))
        return after, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dafter: Tensor, dtotal: Tensor) -> Tensor:
        dafter, dtotal = dafter.contiguous(), dtotal.contiguous()
        batch, T, heads = dafter.shape
        dlog_gamma = torch.empty_like(dafter)
        decays_backward[(batch * heads,)](dafter, dtotal, dlog_gamma, T, heads, **scan(T))
        return dlog_gamma


def scan(T: int) -> dict[str, int]:
    """How the kernels of decays are launched for runs of T tokens."""
    block = min(LONGEST_SCAN, max(32, triton.next_power_of_2(T)))
    return {"BLOCK": block, "num_warps": max(1, block // 256)}
