"""Linear maps started at fan-in variance (paper section G.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
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
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(*map(at_least_fp32, (x, self.weight, self.bias)))
