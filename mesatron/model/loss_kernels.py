"""The output layer's loss of `mesatron.model.fused`, which describes it, as Triton kernels between torch's products.

One kernel reads the logits to a loss; in the backward pass another overwrites them with their gradient. All is computed
in fp32, whatever the dtype of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BLOCK = 4096  # logits of one token that a program holds at a time
IGNORED = tl.constexpr(-100)  # torch's ignored index


@triton.jit
def _capped(row, columns, stride, cap):
    """tanh(logits / cap) in fp32. Reads whole rows, padding included, so that a thread can load 16 bytes at a time."""
    logits = tl.load(row + columns, mask=columns < stride, other=0.0).to(tl.float32)
    return 2 * tl.sigmoid(2 * logits / cap) - 1


@triton.jit
def loss_forward(
    logits,  # [N, V] in rows of `stride`
    targets,  # [N] int64
    losses,  # [N] fp32, written
    normalizers,  # [N] fp32, written: log of the sum of exponentials
    stride,
    V,
    cap,
    BLOCK: tl.constexpr,
):
    """Cross entropy of one token's capped logits; 0 where the target is -100, NaN where there is no such word."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    largest = -float("inf")
    summed = 0.0
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        value = tl.where(columns < V, cap * _capped(row, columns, stride, cap), -float("inf"))
        higher = tl.maximum(largest, tl.max(value, 0))
        summed = summed * tl.exp(largest - higher) + tl.sum(tl.exp(value - higher), 0)
        largest = higher
    normalizer = largest + tl.log(summed)
    target = tl.load(targets + token)
    chosen = cap * _capped(row, tl.minimum(tl.maximum(target, 0), V - 1), stride, cap)
    loss = tl.where((target < 0) | (target >= V), float("nan"), normalizer - chosen)
    tl.store(losses + token, tl.where(target == IGNORED, 0.0, loss))
    tl.store(normalizers + token, normalizer)


@triton.jit
def loss_backward(
    logits,  # [N, V] in rows of `stride`; overwritten by their gradient, which is 0 beyond V
    targets,  # [N] int64
    normalizers,  # [N] fp32
    dlosses,  # [N] fp32
    stride,
    V,
    cap,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = logits + token * stride
    target = tl.load(targets + token)
    scale = tl.where(target < 0, 0.0, tl.load(dlosses + token))
    capped = _capped(row, columns, stride, cap)
    gradient = tl.exp(cap * capped - tl.load(normalizers + token)) - tl.where(columns == target, 1.0, 0.0)
    gradient *= tl.where(columns < V, scale * (1 - capped * capped), 0.0)
    tl.store(row + columns, gradient.to(logits.dtype.element_ty), mask=columns < stride)


class LinearLoss(torch.autograd.Function):
    """hidden [N, width], weight [vocabulary, width], targets int64 [N], cap, chunk_tokens, to the fp32 loss [N]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, cap: float, chunk_tokens: int) -> Tensor:
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        normalizers = torch.empty_like(losses)
        for rows, logits in _logits(hidden, _padded(weight), chunk_tokens):
            loss_forward[(len(logits),)](
                logits, targets[rows], losses[rows], normalizers[rows], logits.shape[1], len(weight), cap,
                BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
        ctx.save_for_backward(hidden, weight, targets, normalizers)
        ctx.cap, ctx.chunk_tokens = cap, chunk_tokens
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers = ctx.saved_tensors
        padded = _padded(weight)
        dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(padded, dtype=torch.float32)
        dlosses = dlosses.contiguous()
        for rows, logits in _logits(hidden, padded, ctx.chunk_tokens):
            loss_backward[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
                logits, targets[rows], normalizers[rows], dlosses[rows], logits.shape[1], len(weight), ctx.cap,
                BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
            torch.mm(logits, padded, out=dhidden[rows])
            dweight += logits.mT @ hidden[rows]
        return dhidden, dweight[: len(weight)].to(weight.dtype), None, None, None


def _padded(weight: Tensor) -> Tensor:
    """The weight with rows of zeros up to a multiple of 64: products over 50,257 words run at a fifth of the rate."""
    return F.pad(weight, (0, 0, 0, -len(weight) % 64))


def _logits(hidden: Tensor, padded: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of tokens and their logits, which the next chunk overwrites."""
    buffer = hidden.new_empty(min(chunk_tokens, len(hidden)), len(padded))
    for begin in range(0, len(hidden), chunk_tokens):
        rows = slice(begin, min(begin + chunk_tokens, len(hidden)))
        yield rows, torch.mm(hidden[rows], padded.mT, out=buffer[: rows.stop - rows.start])
