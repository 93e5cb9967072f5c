"""Which implementation of the Mesa operator a model runs with: decided once, when its device is known."""

from __future__ import annotations

import mesatron_kernels
import torch
from mesatron_kernels import Choice

from mesatron.config import Config
from mesatron.errors import ConfigError


def choose_kernels(config: Config, device: torch.device) -> Choice:
    """What `model.mesa.implementation` stands for on a device, and why. May check the GPU first, for up to a minute.

    Raises ConfigError for triton without a GPU, here or as `model.implementation`, or where its kernels are known to
    fail on this one.
    """
    name = config.model.mesa.implementation
    for key, asked in (("model.implementation", config.model.implementation), ("model.mesa.implementation", name)):
        if asked == "triton" and device.type != "cuda":
            raise ConfigError(f"{key} is triton, which needs a GPU; choose torch or auto here.")
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    try:
        return mesatron_kernels.resolve(name, device, dtype, config.model.head_dim)
    except ValueError as error:
        raise ConfigError(f"model.mesa.implementation is {name}: {error}") from None


def with_kernels(config: Config, implementation: str) -> Config:
    """`config` with the implementation named outright, so that no layer has to ask again."""
    mesa = config.model.mesa.model_copy(update={"implementation": implementation})
    return config.model_copy(update={"model": config.model.model_copy(update={"mesa": mesa})})
