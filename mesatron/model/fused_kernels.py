"""Norm, SwiGLU and short convolution of `mesatron.model.fused`, which describes them, as Triton kernels.

Each reads and writes a tensor once, computes in fp32 and rounds once, at the end. Launch sizes are fixed: nothing is
tuned at start, and sums have the same order in every run. N tokens lie in a row, with C channels each; weight gradients
come as one part per program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 4096  # elements that a program of 4 warps holds at a time
LONGEST_TILE = 64  # tokens
SMALLEST_NORM = tl.constexpr(1e-12)  # as torch's normalize


@triton.jit
def _load(pointer, tokens, channels, C, mask):
    """[tokens, channels] of [N, C] in fp32, 0 where masked."""
    offsets = tokens.to(tl.int64)[:, None] * C + channels[None, :]
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, value, tokens, channels, C, mask):
    offsets = tokens.to(tl.int64)[:, None] * C + channels[None, :]
    tl.store(pointer + offsets, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_forward(
    x,  # [N, C], groups of D channels
    weight,  # [C]
    y,  # [N, C], written
    N,
    C,
    epsilon,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """y = x / sqrt(mean(x^2) + epsilon) * weight over one group of channels."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    channels = tl.program_id(1) * D + columns
    inside = (tokens < N)[:, None] & (columns < D)[None, :]
    value = _load(x, tokens, channels, C, inside)
    scale = tl.load(weight + channels, mask=columns < D, other=0.0).to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(value * value, 1) / D + epsilon)
    _store(y, value * inverse[:, None] * scale[None, :], tokens, channels, C, inside)


@triton.jit
def rms_norm_backward(
    x,  # [N, C]
    weight,  # [C]
    dy,  # [N, C]
    dx,  # [N, C], written
    dweight,  # [programs, C] fp32, written: sums over each program's tokens
    N,
    C,
    epsilon,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TOKENS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_D)
    channels = tl.program_id(1) * D + columns
    scale = tl.load(weight + channels, mask=columns < D, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for begin in range(0, TOKENS, BLOCK_T):
        tokens = tl.program_id(0) * TOKENS + begin + tl.arange(0, BLOCK_T)
        inside = (tokens < N)[:, None] & (columns < D)[None, :]
        value = _load(x, tokens, channels, C, inside)
        gradient = _load(dy, tokens, channels, C, inside)
        inverse = 1 / tl.sqrt(tl.sum(value * value, 1) / D + epsilon)
        value *= inverse[:, None]
        summed += gradient * value
        gradient *= scale[None, :]
        along = tl.sum(gradient * value, 1) / D
        _store(dx, (gradient - value * along[:, None]) * inverse[:, None], tokens, channels, C, inside)
    part = dweight + tl.program_id(0).to(tl.int64) * C + channels
    tl.store(part, tl.sum(summed, 0), mask=columns < D)


class RMSNorm(torch.autograd.Function):
    """x [N, C], weight [groups, D] with groups x D = C, epsilon; to [N, C] in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        y = torch.empty_like(x)
        sizes = _tile(weight.shape[1])
        grid = (triton.cdiv(len(x), sizes["BLOCK_T"]), weight.shape[0])
        rms_norm_forward[grid](x, weight, y, *x.shape, epsilon, **sizes)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        sizes = norm_sums(weight.shape[1])
        parts = x.new_empty(triton.cdiv(len(x), sizes["TOKENS"]), *weight.shape, dtype=torch.float32)
        dx, grid = torch.empty_like(x), (len(parts), weight.shape[0])
        rms_norm_backward[grid](x, weight, dy.contiguous(), dx, parts, *x.shape, ctx.epsilon, **sizes)
        return dx, parts.sum(0).to(weight.dtype), None


@triton.jit
def swiglu_forward(gate, up, y, N, BLOCK: tl.constexpr):
    """y = silu(gate) up, all [N]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(gate + at, mask=at < N, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(y + at, (a * tl.sigmoid(a) * b).to(y.dtype.element_ty), mask=at < N)


@triton.jit
def swiglu_backward(gate, up, dy, dgate, dup, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(gate + at, mask=at < N, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=at < N, other=0.0).to(tl.float32)
    gradient = tl.load(dy + at, mask=at < N, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(dgate + at, (gradient * b * s * (1 + a * (1 - s))).to(dgate.dtype.element_ty), mask=at < N)
    tl.store(dup + at, (gradient * a * s).to(dup.dtype.element_ty), mask=at < N)


class SwiGLU(torch.autograd.Function):
    """silu(gate) up of two contiguous tensors of one shape."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y, N = torch.empty_like(gate), gate.numel()
        swiglu_forward[(triton.cdiv(N, TILE),)](gate, up, y, N, BLOCK=TILE)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup, N = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        swiglu_backward[(triton.cdiv(N, TILE),)](gate, up, dy.contiguous(), dgate, dup, N, BLOCK=TILE)
        return dgate, dup


@triton.jit
def _position(position, tokens, T, DOCUMENTS: tl.constexpr):
    """Position of tokens in their document, or in their row of T tokens."""
    if DOCUMENTS:
        return tl.load(position + tokens, mask=tokens < T, other=0)
    return tokens % T


@triton.jit
def _earlier(x, history, tokens, place, channels, inside, T, C, WIDTH: tl.constexpr):
    """x[token - lag] for every lag below WIDTH; from before the start of a row what `history` has there, of a document
    nothing."""
    seen = tl.tuple([])
    for lag in tl.static_range(WIDTH):
        value = _load(x, tokens - lag, channels, C, inside & (place >= lag)[:, None])
        if history is not None:
            before = tokens // T * (WIDTH - 1) + WIDTH - 1 + place - lag
            value += _load(history, before, channels, C, inside & (place < lag)[:, None])
        seen += (value,)
    return seen


@triton.jit
def _convolve(seen, weight, channels, C, WIDTH: tl.constexpr):
    """sum over lags of weight[channel, lag] x[token - lag]."""
    summed = tl.zeros(seen[0].shape, tl.float32)
    for lag in tl.static_range(WIDTH):
        factor = tl.load(weight + channels * WIDTH + lag, mask=channels < C, other=0.0)
        summed += seen[lag] * factor.to(tl.float32)[None, :]
    return summed


@triton.jit
def unit_heads_forward(
    x,  # [N, C]
    weight,  # [C, WIDTH]
    position,  # [N] int32, if DOCUMENTS
    history,  # [N / T, WIDTH - 1, C], what comes before each row, or None; not with DOCUMENTS
    y,  # [N, C], written
    N,
    T,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """One head of silu(convolution), brought to norm 1."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    channels = tl.program_id(1) * D + columns
    inside = (tokens < N)[:, None] & (columns < D)[None, :]
    place = _position(position, tokens, T, DOCUMENTS)
    seen = _earlier(x, history, tokens, place, channels, inside, T, C, WIDTH)
    value = _convolve(seen, weight, channels, C, WIDTH)
    value *= tl.sigmoid(value)
    norm = tl.sqrt(tl.sum(value * value, 1))
    _store(y, value / tl.maximum(norm, SMALLEST_NORM)[:, None], tokens, channels, C, inside)


@triton.jit
def unit_heads_backward(
    x,  # [N, C]
    weight,  # [C, WIDTH]
    position,  # [N] int32, if DOCUMENTS
    history,  # as for unit_heads_forward
    dy,  # [N, C]
    dz,  # [N, C], written: gradient of the convolution's output
    dweight,  # [programs, WIDTH, C] fp32, written: sums over each program's tokens
    N,
    T,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_D)
    channels = tl.program_id(1) * D + columns
    sums = tl.tuple([])  # for every lag; over tokens at the end only, for that makes all warps wait
    for _ in tl.static_range(WIDTH):
        sums += (tl.zeros([BLOCK_T, BLOCK_D], tl.float32),)
    for begin in range(0, TOKENS, BLOCK_T):
        tokens = tl.program_id(0) * TOKENS + begin + tl.arange(0, BLOCK_T)
        inside = (tokens < N)[:, None] & (columns < D)[None, :]
        place = _position(position, tokens, T, DOCUMENTS)
        seen = _earlier(x, history, tokens, place, channels, inside, T, C, WIDTH)
        z = _convolve(seen, weight, channels, C, WIDTH)
        s = tl.sigmoid(z)
        value = z * s
        inverse = 1 / tl.maximum(tl.sqrt(tl.sum(value * value, 1)), SMALLEST_NORM)
        value *= inverse[:, None]
        gradient = _load(dy, tokens, channels, C, inside)
        along = tl.sum(gradient * value, 1)
        gradient = (gradient - value * along[:, None]) * inverse[:, None] * s * (1 + z * (1 - s))
        _store(dz, gradient, tokens, channels, C, inside)
        more = tl.tuple([])
        for lag in tl.static_range(WIDTH):
            more += (sums[lag] + gradient * seen[lag],)
        sums = more
    for lag in tl.static_range(WIDTH):
        part = dweight + (tl.program_id(0).to(tl.int64) * WIDTH + lag) * C + channels
        tl.store(part, tl.sum(sums[lag], 0), mask=columns < D)


@triton.jit
def convolution_backward(
    dz,  # [N, C]
    weight,  # [C, WIDTH]
    position,  # [N] int32, if DOCUMENTS
    dx,  # [N, C], written
    N,
    T,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """dx[token] = sum over lags of weight[channel, lag] dz[token + lag], as far as that token saw this one."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    channels = tl.program_id(1) * D + columns
    inside = (tokens < N)[:, None] & (columns < D)[None, :]
    summed = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for lag in tl.static_range(WIDTH):
        later = tokens + lag
        sees = (later < N) & (_position(position, later, T, DOCUMENTS) >= lag)
        seen = _load(dz, later, channels, C, inside & sees[:, None])
        summed += seen * tl.load(weight + channels * WIDTH + lag, mask=channels < C, other=0.0).to(tl.float32)[None, :]
    _store(dx, summed, tokens, channels, C, inside)


@triton.jit
def history_backward(
    dz,  # [N, C] in rows of T
    weight,  # [C, WIDTH]
    dhistory,  # [M, C] in rows of WIDTH - 1, written
    M,
    T,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDTH: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """As convolution_backward, for what comes before each row."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row, place = tokens // (WIDTH - 1), tokens % (WIDTH - 1) - (WIDTH - 1)
    columns = tl.arange(0, BLOCK_D)
    channels = tl.program_id(1) * D + columns
    inside = (tokens < M)[:, None] & (columns < D)[None, :]
    summed = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for lag in tl.static_range(WIDTH):
        later = place + lag
        seen = _load(dz, row * T + later, channels, C, inside & ((later >= 0) & (later < T))[:, None])
        summed += seen * tl.load(weight + channels * WIDTH + lag, mask=channels < C, other=0.0).to(tl.float32)[None, :]
    _store(dhistory, summed, tokens, channels, C, inside)


class UnitHeads(torch.autograd.Function):
    """x [N, C] of rows of T tokens, each after its `history` [N / T, width - 1, C] if there is one, or with `position`
    int32 [N] of documents, and weight [C, width], to [N, C]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, position: Tensor | None, history: Tensor | None, T: int, head_dim: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, position, history)
        (N, C), width = x.shape, weight.shape[1]
        ctx.T, ctx.sizes = T, _tile(head_dim, TILE // 2) | {"WIDTH": width, "DOCUMENTS": position is not None}
        y = torch.empty_like(x)
        grid = (triton.cdiv(N, ctx.sizes["BLOCK_T"]), C // head_dim)
        unit_heads_forward[grid](x, weight, position, history, y, N, T, C, **ctx.sizes)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, position, history = ctx.saved_tensors
        (N, C), width, T, sizes = x.shape, weight.shape[1], ctx.T, ctx.sizes
        sums = heads_sums(sizes["D"])
        heads, programs = C // sizes["D"], triton.cdiv(N, sums["TOKENS"])
        dz, dx = torch.empty_like(x), torch.empty_like(x)
        parts = x.new_empty(programs, width, C, dtype=torch.float32)
        unit_heads_backward[(programs, heads)](
            x, weight, position, history, dy.contiguous(), dz, parts, N, T, C, **sizes | sums
        )
        grid = (triton.cdiv(N, sizes["BLOCK_T"]), heads)
        convolution_backward[grid](dz, weight, position, dx, N, T, C, **sizes)
        dhistory = None
        if history is not None:
            dhistory = torch.empty_like(history)
            M = N // T * (width - 1)
            grid = (triton.cdiv(M, sizes["BLOCK_T"]), heads)
            history_backward[grid](dz, weight, dhistory, M, T, C, **sizes)
        return dx, parts.sum(0).mT.to(weight.dtype), None, dhistory, None, None


def _tile(D: int, elements: int = TILE) -> dict[str, int]:
    """Groups of D channels and as many tokens as make up a tile."""
    block = triton.next_power_of_2(D)
    return {"D": D, "BLOCK_D": block, "BLOCK_T": min(LONGEST_TILE, max(1, elements // block))}


def norm_sums(D: int) -> dict[str, int]:
    """How `rms_norm_backward` is launched. Rows of many channels are few programs, so that each gets fewer tokens."""
    elements, tokens = (TILE, 64) if D > 256 else (TILE // 4, 128)
    return _tile(D, elements) | {"TOKENS": tokens, "num_warps": 4}


def heads_sums(D: int) -> dict[str, int]:
    """How `unit_heads_backward` is launched, which holds a tile more for every lag."""
    return _tile(D, TILE // 8) | {"TOKENS": 128, "num_warps": 2}
