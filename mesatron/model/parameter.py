"""Parameters that know their start value, so that any process can make any of them from the seed alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ParameterInfo:
    """Start distribution of a parameter and whether weight decay applies to it."""

    mean: float
    std: float
    weight_decay: bool


def make_parameter(*shape: int, mean: float = 0.0, std: float = 0.0, weight_decay: bool = True) -> nn.Parameter:
    """An fp32 parameter of `shape`, all `mean` until `initialize` or a checkpoint fills it."""
    parameter = nn.Parameter(torch.full(shape, mean))
    parameter.info = ParameterInfo(mean, std, weight_decay)  # type: ignore[attr-defined]
    return parameter


def initial_value(name: str, shape: torch.Size, info: ParameterInfo, seed: int) -> torch.Tensor:
    """The fp32 start value of the parameter `name`: a function of seed and name alone, so no layout changes it."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if not info.std:
        return torch.full(shape, info.mean)
    return torch.randn(shape, generator=generator).mul_(info.std).add_(info.mean)


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill every parameter of an unsharded `model` with its start value."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, parameter.info, seed))  # type: ignore[attr-defined]
