"""Root mean square normalisation."""

from __future__ import annotations

from torch import Tensor, nn

from mesatron.model import fused
from mesatron.model.parameter import make_parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, computed in fp32 and returned in x's dtype.

    `shape` is (channels,) or (heads, head_dim): the latter norms every head by itself with weights of its own.
    """

    def __init__(self, shape: tuple[int, ...], epsilon: float, implementation: str = "auto") -> None:
        super().__init__()
        self.epsilon = epsilon
        self.implementation = implementation
        self.weight = make_parameter(*shape, mean=1.0, weight_decay=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., *shape] to the same shape."""
        return fused.rms_norm(x, self.weight, self.epsilon, self.implementation)
