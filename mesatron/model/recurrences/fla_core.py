"""Between our operators and fla-core's kernels, and where those must not be used."""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec

import torch
from torch import Tensor

from mesatron.model.recurrences.linear_attention import LinearState

LEAST_LOG_GAMMA = -40.0
"""Below it a state is nothing beside the rounding of fp32; -inf would make fla-core's sums of logarithms NaN."""


def bounded(log_gamma: Tensor) -> Tensor:
    """log_gamma without -inf."""
    return log_gamma.clamp(min=LEAST_LOG_GAMMA)


def transposed(state: LinearState | None) -> Tensor | None:
    """fla-core's form [N, h, D, Dv] of a state."""
    return None if state is None else state.G.mT.contiguous()


def state_of(G: Tensor | None) -> LinearState | None:
    """The inverse of `transposed`."""
    return None if G is None else LinearState(G.mT)


def refusal(kernel: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why fla-core's `kernel` (simple_gla, delta_rule, gated_delta_rule or hgrn) cannot be used, if it cannot.

    Triton 3.4.0 to 3.7.0 miscompile the backward pass of its gated chunk kernels on Hopper (its issue 640).
    """
    if device.type != "cuda":
        return "no GPU"
    if find_spec("fla") is None:
        return "fla-core is not installed"
    if kernel != "hgrn" and dtype not in (torch.bfloat16, torch.float16):
        return f"fla-core's {kernel} has no {str(dtype).removeprefix('torch.')}"
    if kernel in ("simple_gla", "gated_delta_rule") and torch.cuda.get_device_capability(device)[0] == 9:
        version = importlib.metadata.version("triton")
        if (3, 4, 0) <= _numbers(version) < (3, 7, 1):
            return f"Triton {version} miscompiles fla-core's {kernel} on Hopper"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:3])
