"""The models that learn a task: the backbone of every other model here, two blocks of it (paper table 9)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mesatron.config import ModelConfig
from mesatron.model.backbone import Backbone
from mesatron.model.linear import Linear
from mesatron.model.norm import RMSNorm
from mesatron.model.parameter import initialize
from mesatron.synthetic.tasks import Task


class NoMixer(nn.Module):
    """A mixer that adds nothing, so that every token is by itself: what a task takes without one."""

    def forward(self, x: Tensor, *_: object) -> tuple[Tensor, None]:
        """x [B, T, width] to zeros."""
        return torch.zeros_like(x), None


class AutoEncoder(Backbone):
    """MAD's auto-encoder: every token is said again by an MLP, from the state at the last token and its own position.

    The MLP is as wide as the model: norm, linear, GELU, twice, and the tied embedding instead of an output layer of its
    own. Positions are sines and cosines, added to the state.
    """

    positions: Tensor

    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__(config)
        width = config.width
        self.decoder = nn.Sequential(
            RMSNorm((width,), config.norm_epsilon, config.implementation), Linear(width, width), nn.GELU(),
            RMSNorm((width,), config.norm_epsilon, config.implementation), Linear(width, width), nn.GELU(),
            RMSNorm((width,), config.norm_epsilon, config.implementation),
        )  # fmt: skip
        self.register_buffer("positions", sinusoids(length, width))

    def hidden(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """What the MLP makes of every position, [B, T, width], for tokens [B, T] of the `length` given."""
        return self.decoder(super().hidden(tokens, cu_seqlens)[:, -1:] + self.positions)


def sinusoids(length: int, width: int) -> Tensor:
    """[length, width]: sines, then cosines, of the position, of wavelengths 2 pi to 20,000 pi (arXiv 1706.03762)."""
    rates = 10_000 ** (-torch.arange(width // 2, dtype=torch.float64) / max(1, width // 2 - 1))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1).float()


def build(task: Task, config: ModelConfig, with_mixer: bool, seed: int) -> Backbone:
    """The model for a task with its start weights, on the CPU; without its mixers if so asked."""
    model = AutoEncoder(config, task.length) if task.auto_encoder else Backbone(config)
    if not with_mixer:
        for block in model.blocks:
            block.mixer = NoMixer()
    initialize(model, seed)
    return model
