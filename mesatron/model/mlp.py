"""The SwiGLU MLP of every block."""

from __future__ import annotations

from torch import Tensor, nn

from mesatron.config import ModelConfig
from mesatron.model import fused
from mesatron.model.linear import Linear


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), both branches `mlp_width` wide (paper section E.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.implementation = config.implementation
        self.gate = Linear(config.width, config.mlp_width)
        self.up = Linear(config.width, config.mlp_width)
        self.down = Linear(config.mlp_width, config.width, gain=2.0 / config.layers)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] to the same shape."""
        return self.down(fused.swiglu(self.gate(x), self.up(x), self.implementation))
