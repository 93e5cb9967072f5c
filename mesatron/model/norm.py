"""Root mean square normalisation."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mesatron.model.parameter import make_parameter
from mesatron.model.precision import at_least_fp32


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, computed in fp32 and returned in x's dtype.

    `shape` is (channels,) or (heads, head_dim): the latter norms every head by itself with weights of its own.
    """

    def __init__(self, shape: tuple[int, ...], epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = make_parameter(*shape, mean=1.0, weight_decay=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., *shape] to the same shape."""
        normed = F.rms_norm(at_least_fp32(x), x.shape[-1:], eps=self.epsilon)
        return (normed * self.weight).to(x.dtype)
