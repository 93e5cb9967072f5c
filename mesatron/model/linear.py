"""Linear maps started at fan-in variance (paper section G.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mesatron.model.parameter import make_parameter
from mesatron.model.precision import at_least_fp32


class Linear(nn.Module):
    """y = x W^T without bias; weight [outputs, inputs], normal with variance `gain` / inputs."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = make_parameter(outputs, inputs, std=(gain / inputs) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] to [..., outputs]."""
        return F.linear(x, self.weight)


class GateProjection(nn.Module):
    """Gate logits, in fp32 whatever the dtype of weights and input.

    In bf16 a logit near 7 (gamma 0.999) would move in steps of 1/32, and 1 - gamma, the inverse of the decay horizon,
    by 3 % with it; the sigmoid of such a logit would round to 1.
    """

    def __init__(self, inputs: int, heads: int) -> None:
        super().__init__()
        self.weight = make_parameter(heads, inputs, std=inputs**-0.5)
        self.bias = make_parameter(heads, weight_decay=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] to fp32 logits [..., heads]."""
        (logits,) = gate_logits(x, self)
        return logits


def gate_logits(x: Tensor, *projections: GateProjection) -> tuple[Tensor, ...]:
    """The fp32 logits [..., heads] of every projection of x [..., inputs], in one product, so that x is read once."""
    weight, bias = (torch.cat(parts) for parts in zip(*((p.weight, p.bias) for p in projections), strict=True))
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype == weight.dtype == torch.bfloat16:
            flat = _ProductInFp32.apply(x.reshape(-1, x.shape[-1]), weight)
            logits = flat.view(*x.shape[:-1], len(bias)) + bias
        else:
            logits = F.linear(*map(at_least_fp32, (x, weight, bias)))
    return logits.split([len(p.bias) for p in projections], -1)


class _ProductInFp32(torch.autograd.Function):
    """x [N, inputs] weight [outputs, inputs]^T, both bf16, in fp32, where products of bf16 numbers are exact.

    Its gradient enters products as two terms of bf16, 16 bits together.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product_in_fp32(x, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        high = dy.to(x.dtype)
        terms = torch.cat([high, (dy - high).to(x.dtype)], 1)
        dweight = _product_in_fp32(terms.T, x).view(2, *weight.shape).sum(0)
        return terms @ torch.cat([weight, weight]), dweight.to(weight.dtype)


def _product_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a b of bf16 matrices."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # what torch has for a CPU rounds to bf16
