"""`weighted_products` of `decay`, of bf16 tensors, as Triton kernels: tensors are read once, as they are, and products
are formed on tensor cores. What is not exact in bf16 enters as two terms of it, 16 bits together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from mesatron_kernels.triton_tiles import tile_product
from torch import Tensor
from torch.autograd.function import once_differentiable

L = 64  # tokens that a program multiplies at a time
FORWARD_ROWS, BACKWARD_ROWS = 64, 32  # channels of v that a program multiplies at a time; more would not fit registers
SHORTEST_PART = 512  # tokens: fewer would cost more in adding parts up than they gain
PROGRAMS = 512  # that fill a GPU


@triton.jit
def products_forward(
    v, k,  # [B, T, heads, E or D] bf16
    weights,  # [B, T, heads] fp32
    sums,  # [parts, B, heads, E, D] fp32, written
    T, heads, part_length,
    E: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """The sum over one part of the tokens, for a block of rows of one head."""
    row, part = tl.program_id(0), tl.program_id(2)
    batch, head = (row // heads).to(tl.int64), row % heads
    rows, columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    end = tl.minimum((part + 1) * part_length, T)
    acc = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    for begin in range(part * part_length, end, L):
        tokens = begin + tl.arange(0, L)
        places, valid = (batch * T + tokens) * heads + head, tokens < end
        weight = tl.load(weights + places, mask=valid, other=0.0)
        keys = tl.load(
            k + places[:, None] * D + columns[None, :], mask=valid[:, None] & (columns[None, :] < D), other=0.0
        )
        values = tl.load(v + places[None, :] * E + rows[:, None], mask=valid[None, :] & (rows[:, None] < E), other=0.0)
        weighted = keys.to(tl.float32) * weight[:, None]
        high = weighted.to(tl.bfloat16)
        acc = tile_product(values, high, acc, "bf16")
        acc = tile_product(values, (weighted - high.to(tl.float32)).to(tl.bfloat16), acc, "bf16")
    base = (part * tl.num_programs(0) + row).to(tl.int64) * E * D
    place = rows[:, None] * D + columns[None, :]
    tl.store(sums + base + place, acc, mask=(rows[:, None] < E) & (columns[None, :] < D))


@triton.jit
def products_backward(
    v, k, weights,
    high, low,  # [B, heads, E, D] bf16: the sums' gradient in two terms
    dv, dk, dweights,  # written
    T, heads,
    E: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, L: tl.constexpr,
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
    base = row.to(tl.int64) * E * D
    for first in range(0, E, BLOCK_E):
        rows = first + tl.arange(0, BLOCK_E)
        value_places, value_mask = places[:, None] * E + rows[None, :], valid[:, None] & (rows[None, :] < E)
        values = tl.load(v + value_places, mask=value_mask, other=0.0)
        inside = (rows[:, None] < E) & (columns[None, :] < D)
        place = base + rows[:, None] * D + columns[None, :]
        gradient = tile_product(values, tl.load(high + place, mask=inside, other=0.0), gradient, "bf16")
        gradient = tile_product(values, tl.load(low + place, mask=inside, other=0.0), gradient, "bf16")
        inside = (rows[None, :] < E) & (columns[:, None] < D)
        place = base + rows[None, :] * D + columns[:, None]
        of_values = tl.zeros([L, BLOCK_E], tl.float32)
        of_values = tile_product(keys, tl.load(high + place, mask=inside, other=0.0), of_values, "bf16")
        of_values = tile_product(keys, tl.load(low + place, mask=inside, other=0.0), of_values, "bf16")
        of_values *= weight[:, None]
        tl.store(dv + value_places, of_values.to(dv.dtype.element_ty), mask=value_mask)
    tl.store(dweights + places, tl.sum(gradient * keys.to(tl.float32), 1), mask=valid)
    gradient *= weight[:, None]
    tl.store(dk + key_places, gradient.to(dk.dtype.element_ty), mask=key_mask)


class WeightedProducts(torch.autograd.Function):
    """v [B, T, h, E] and k [B, T, h, D], bf16, and weights, fp32 [B, T, h], to the fp32 sums [B, h, E, D]."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        v, k, weights = v.contiguous(), k.contiguous(), weights.contiguous()
        ctx.save_for_backward(v, k, weights)
        batch, T, heads, D = k.shape
        E, blocks = v.shape[-1], triton.cdiv(v.shape[-1], FORWARD_ROWS)
        wanted = triton.cdiv(PROGRAMS, batch * heads * blocks)
        part_length = max(SHORTEST_PART, L * triton.cdiv(T, wanted * L))
        parts = triton.cdiv(T, part_length)
        sums = weights.new_empty(parts, batch, heads, E, D)
        products_forward[(batch * heads, blocks, parts)](
            v, k, weights, sums, T, heads, part_length, **sizes(E, D, products_forward)
        )
        return sums.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor, ...]:
        v, k, weights = ctx.saved_tensors
        dv, dk, dweights = torch.empty_like(v), torch.empty_like(k), torch.empty_like(weights)
        batch, T, heads, D = k.shape
        dsums = dsums.contiguous()
        high = dsums.to(k.dtype)
        low = (dsums - high).to(k.dtype)
        products_backward[(batch * heads, triton.cdiv(T, L))](
            v, k, weights, high, low, dv, dk, dweights, T, heads, **sizes(v.shape[-1], D, products_backward)
        )
        return dv, dk, dweights


def sizes(E: int, D: int, kernel: Any) -> dict[str, int]:
    """How a kernel is launched for heads of so many channels."""
    rows, stages = (FORWARD_ROWS, 3) if kernel is products_forward else (BACKWARD_ROWS, 1)
    launch = {"num_warps": 8 if D > 64 else 4, "num_stages": stages}
    return {"E": E, "D": D, "L": L, "BLOCK_E": rows, "BLOCK_D": max(64, triton.next_power_of_2(D))} | launch
