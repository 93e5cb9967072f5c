"""Compute again, alone, a layer whose inputs a skipped step has left behind, and show where it stops being finite."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mesatron.config import Config, ModelConfig, load_stored_config
from mesatron.config.mixers import SECTIONS
from mesatron.errors import DataError
from mesatron.model.backbone import Backbone

PARAMETER = "parameter/"


@dataclass(frozen=True)
class Reading:
    """One tensor of the layer: how many of its numbers are not finite, and the largest magnitude of the others."""

    name: str
    shape: tuple[int, ...]
    not_finite: int
    largest: float


def replay(path: Path) -> tuple[dict[str, Any], list[Reading]]:
    """What is known of a file in `nonfinite/`, and readings of its layer, forward and backward, in order.

    The layer runs whole and alone, on a GPU if there is one: under context or sequence parallelism its input is one
    process's piece of the tokens. Raises DataError for another file.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
        about, config = json.loads(metadata["about"]), _config(metadata["config"])
    except (SafetensorError, KeyError, OSError) as error:
        raise DataError(f"{path} is no file of a non-finite step ({error}); look in nonfinite/ of a run.") from None
    readings: list[Reading] = [_read(name, tensor) for name, tensor in tensors.items()]
    model = Backbone(_only(about["layer"], config.model)).to(device)
    for name, x in tensors.items():
        if name.startswith(PARAMETER):
            own_name = re.sub(r"^blocks\.\d+", "blocks.0", name.removeprefix(PARAMETER))
            model.get_parameter(own_name).data.copy_(x)
    bf16 = config.train.precision == "bf16"
    if bf16 and config.parallel.zero_stage:
        model.bfloat16()
    x = tensors["input"]
    x.requires_grad_(x.is_floating_point())
    autocast = torch.autocast(device.type, torch.bfloat16) if bf16 and not config.parallel.zero_stage else nullcontext()
    hooks = list(_watch(model, readings))
    with autocast:
        y = _run(model, about["layer"], tensors)
    if y.requires_grad:
        y.backward(tensors.get("grad_output", torch.ones_like(y)))
    for hook in hooks:
        hook.remove()
    if x.grad is not None:
        readings.append(_read("gradient of input", x.grad))
    readings += [_read(f"gradient of {n}", p.grad) for n, p in model.named_parameters() if p.grad is not None]
    return about, readings


def _only(layer: str, model: ModelConfig) -> ModelConfig:
    """`model` with one block, which is that of `layer` if this is a block's name."""
    number = layer.removeprefix("blocks.")
    mixer = str(model.mixer_of(int(number) if number.isdigit() else 0))
    return model.model_copy(update={"layers": 1, "mixer": mixer})


def _config(text: str) -> Config:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        overrides = []
        if not torch.cuda.is_available():
            overrides = ["model.implementation=auto", *(f"model.{mixer}.implementation=auto" for mixer in SECTIONS)]
        return load_stored_config(Path(file.name), overrides)


def _run(model: Backbone, layer: str, tensors: dict[str, Tensor]) -> Tensor:
    x = tensors["input"]
    if layer == "embedding":
        return model.embedding(x)
    if layer == "output":
        return model.embedding(model.norm(x), tensors["targets"].view(x.shape[:-1]))
    return model.blocks[0](x, None, tensors.get("cu_seqlens"))[0]


def _watch(model: Backbone, readings: list[Reading]) -> Iterator[RemovableHandle]:
    """Make every module add a reading of what it gives, and of what it observed meanwhile, such as gates."""

    def note(module: nn.Module, _: Any, result: Any, name: str) -> None:
        observations: dict[str, Tensor] = getattr(module, "observations", {})
        readings.extend(_read(f"{name} observes {what}", x) for what, x in observations.items())
        readings.append(_read(f"{name} gives", result[0] if isinstance(result, tuple) else result))

    for name, module in model.named_modules():
        if name:
            yield module.register_forward_hook(partial(note, name=name.removeprefix("blocks.0.")))


def _read(name: str, x: Tensor) -> Reading:
    x = x.detach().float()
    finite = x[x.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return Reading(name, tuple(x.shape), x.numel() - finite.numel(), largest)
