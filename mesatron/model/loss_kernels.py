"""The scores that `mesatron.model.fused` makes the output layer's loss of, as Triton kernels between torch's products.

One kernel reads the logits to two scores a token; in the backward pass another overwrites them with their gradient. All
is computed in fp32, whatever the dtype of the logits.
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


@triton.jit
def _capped(row, columns, stride, cap):
    """tanh(logits / cap) in fp32. Reads whole rows, padding included, so that a thread can load 16 bytes at a time."""
    logits = tl.load(row + columns, mask=columns < stride, other=0.0).to(tl.float32)
    return 2 * tl.sigmoid(2 * logits / cap) - 1


@triton.jit
def scores_forward(
    logits,  # [N, V] in rows of `stride`
    targets,  # [N] int64
    normalizers,  # [N] fp32, written: log of the sum of exponentials, -inf if V is 0
    chosen,  # [N] fp32, written: the target's capped logit, -inf where it is not among the V
    stride,
    V,
    cap,
    BLOCK: tl.constexpr,
):
    """The scores of one token's capped logits."""
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
    tl.store(normalizers + token, largest + tl.log(summed))
    target = tl.load(targets + token)
    here = (target >= 0) & (target < V)
    value = cap * _capped(row, tl.where(here, target, 0), stride, cap)
    tl.store(chosen + token, tl.where(here, value, -float("inf")))


@triton.jit
def scores_backward(
    logits,  # [N, V] in rows of `stride`; overwritten by their gradient, which is 0 beyond V
    targets,  # [N] int64
    normalizers,  # [N] fp32
    dnormalizers,  # [N] fp32
    dchosen,  # [N] fp32
    stride,
    V,
    cap,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = logits + token * stride
    capped = _capped(row, columns, stride, cap)
    gradient = tl.load(dnormalizers + token) * tl.exp(cap * capped - tl.load(normalizers + token))
    gradient += tl.where(columns == tl.load(targets + token), tl.load(dchosen + token), 0.0)
    gradient = tl.where(columns < V, gradient * (1 - capped * capped), 0.0)
    tl.store(row + columns, gradient.to(logits.dtype.element_ty), mask=columns < stride)


class LinearScores(torch.autograd.Function):
    """hidden [N, width], weight [rows, width], targets int64 [N], words, cap, chunk_tokens, to the fp32 scores [2, N]
    of `mesatron.model.fused.linear_scores`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, words: int, cap: float, chunk_tokens: int
    ) -> Tensor:
        scores = hidden.new_empty(2, len(hidden), dtype=torch.float32)
        normalizers, chosen = scores
        for rows, logits in _logits(hidden, _padded(weight), chunk_tokens):
            scores_forward[(len(logits),)](
                logits, targets[rows], normalizers[rows], chosen[rows], logits.shape[1], words, cap,
                BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
        ctx.save_for_backward(hidden, weight, targets, scores)
        ctx.words, ctx.cap, ctx.chunk_tokens = words, cap, chunk_tokens
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, (normalizers, _) = ctx.saved_tensors
        padded = _padded(weight)
        dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(padded, dtype=torch.float32)
        dnormalizers, dchosen = dscores.contiguous()
        for rows, logits in _logits(hidden, padded, ctx.chunk_tokens):
            scores_backward[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
                logits, targets[rows], normalizers[rows], dnormalizers[rows], dchosen[rows], logits.shape[1], ctx.words,
                ctx.cap, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
            torch.mm(logits, padded, out=dhidden[rows])
            dweight += logits.mT @ hidden[rows]
        return dhidden, dweight[: len(weight)].to(weight.dtype), None, None, None, None


def _padded(weight: Tensor) -> Tensor:
    """The weight with rows of zeros up to a multiple of 64: products over 50,257 words run at a fifth of the rate."""
    return F.pad(weight, (0, 0, 0, -len(weight) % 64))


def _logits(hidden: Tensor, padded: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of tokens and their logits, which the next chunk overwrites."""
    buffer = hidden.new_empty(min(chunk_tokens, len(hidden)), len(padded))
    for begin in range(0, len(hidden), chunk_tokens):
        rows = slice(begin, min(begin + chunk_tokens, len(hidden)))
        yield rows, torch.mm(hidden[rows], padded.mT, out=buffer[: rows.stop - rows.start])
