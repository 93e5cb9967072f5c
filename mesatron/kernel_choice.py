"""Which implementation each mixer of a model runs with: decided once, when its device is known."""

from __future__ import annotations

from collections.abc import Mapping

import mesatron_kernels
import torch
from mesatron_kernels import Choice

from mesatron.config import Config
from mesatron.errors import ConfigError
from mesatron.model.attention import flex_refusal
from mesatron.model.recurrences.fla_core import CONTINUED_DELTA, LARGEST_MESA_HEAD, refusal

FLA_KERNELS = {
    "gla": "simple_gla", "mamba2": "simple_gla", "deltanet": "delta_rule", "gated_deltanet": "gated_delta_rule",
    "hawk": "hgrn",
}  # fmt: skip
"""The kernel of fla-core that serves a mixer."""


def choose_kernels(config: Config, device: torch.device) -> dict[str, Choice]:
    """What `model.MIXER.implementation` stands for on a device, and why, for every mixer in use. May check the GPU
    first, for up to a minute.

    Raises ConfigError for triton, fla or flex without a GPU, also as `model.implementation`, or where their kernels are
    known to fail on this one.
    """
    _refuse_triton_without_gpu("model.implementation", config.model.implementation, device)
    return {mixer: _choose(mixer, config, device) for mixer in config.model.used_mixers}


def with_kernels(config: Config, choices: Mapping[str, Choice]) -> Config:
    """`config` with the implementations named outright, so that no layer has to ask again."""
    sections = {
        mixer: getattr(config.model, mixer).model_copy(update={"implementation": choice.implementation})
        for mixer, choice in choices.items()
    }
    return config.model_copy(update={"model": config.model.model_copy(update=sections)})


def _choose(mixer: str, config: Config, device: torch.device) -> Choice:
    key, name = f"model.{mixer}.implementation", getattr(config.model, mixer).implementation
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    if mixer == "mesa" and name == "fla":
        reason = refusal("mesa_net", dtype, device)
        if reason is None and config.model.head_dim > LARGEST_MESA_HEAD:
            reason = f"fla-core's mesa_net has heads of {LARGEST_MESA_HEAD} at most, not {config.model.head_dim}"
        if reason is not None:
            raise _unusable(key, name, reason)
        return Choice("fla", "the peer's kernel, for comparison: it loses small gradients")
    if mixer in ("mesa", "mesa_rls"):
        _refuse_triton_without_gpu(key, name, device)
        try:
            return mesatron_kernels.resolve(name, device, dtype, config.model.head_dim)
        except ValueError as error:
            raise ConfigError(f"{key} is {name}: {error}") from None
    if mixer in ("transformer", "swa") and name in ("auto", "flex"):
        reason = flex_refusal(config.model.head_dim, device)
        if reason is None:
            return Choice("flex", "as asked" if name == "flex" else "for documents and windows")
        if name == "flex":
            raise _unusable(key, name, reason)
        return Choice("torch", reason)
    if name not in ("auto", "fla"):
        return Choice(name, "as asked")
    if mixer not in FLA_KERNELS:
        return Choice("torch", "the only fast one")
    kernel = FLA_KERNELS[mixer]
    if mixer == "deltanet" and config.parallel.context_size > 1:
        # A run of a sequence goes on from a state, and documents that begin inside it are gates that forget all.
        kernel = "gated_delta_rule" if config.data.reset_state_at_documents else CONTINUED_DELTA
    reason = refusal(kernel, dtype, device)
    if reason is None:
        return Choice("fla", "as asked" if name == "fla" else "fla-core has no known fault here")
    if name == "fla":
        raise _unusable(key, name, reason)
    return Choice("torch", reason)


def _unusable(key: str, name: str, reason: str) -> ConfigError:
    return ConfigError(f"{key} is {name}, which cannot be used: {reason}; choose torch or auto here.")


def _refuse_triton_without_gpu(key: str, name: str, device: torch.device) -> None:
    if name == "triton" and device.type != "cuda":
        raise ConfigError(f"{key} is triton, which needs a GPU; choose torch or auto here.")
