"""Between our operators and fla-core's kernels, and where those must not be used."""

from __future__ import annotations

import torch
from packaging.version import Version, parse
from torch import Tensor

from mesatron.model.recurrences.linear_attention import LinearState

LEAST_VERSION = Version("0.6")
LEAST_LOG_GAMMA = -40.0
"""Below it a state is nothing beside the rounding of fp32; -inf would make fla-core's sums of logarithms NaN."""
CONTINUED_DELTA = "delta_rule from a state"
"""A kernel's name for `refusal`: delta_rule that is given an initial state."""
LARGEST_MESA_HEAD = 128
"""Channels of a head that its mesa_net takes."""


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
    """Why fla-core's `kernel` cannot be used, if so: simple_gla, delta_rule, CONTINUED_DELTA, gated_delta_rule, hgrn or
    mesa_net."""
    if device.type != "cuda":
        return "no GPU"
    try:
        import fla.ops
        import triton
    except Exception as error:  # it looks at the GPU and at Triton while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name == "fla":
            return "fla-core is not installed"
        return f"fla-core cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
    return known_fault(kernel, dtype, fla.__version__, triton.__version__, torch.cuda.get_device_capability(device)[0])


def known_fault(kernel: str, dtype: torch.dtype, fla: str, triton: str, capability: int) -> str | None:
    """`refusal` by the versions of fla-core and Triton and the GPU's major compute capability (Hopper's is 9).

    Triton 3.4.0 to 3.7.0 miscompile the backward pass of fla-core's gated chunk kernels on Hopper (its issue 640).
    With 3.6.0 on an H200 its delta_rule is right from an empty state, but wrong by more than 2 % from a given one,
    which in the interpreter it is not. mesa_net was right there for heads of 128; others were not tried.
    """
    if parse(fla) < LEAST_VERSION:
        return f"fla-core is {fla}, but {LEAST_VERSION} or later is needed"
    if kernel != "hgrn" and dtype not in (torch.bfloat16, torch.float16):
        return f"fla-core's {kernel} has no {str(dtype).removeprefix('torch.')}"
    affected = kernel in ("simple_gla", "gated_delta_rule", CONTINUED_DELTA)
    if affected and capability == 9 and Version("3.4.dev0") <= parse(triton) < Version("3.7.1"):
        return f"Triton {triton} miscompiles fla-core's {kernel} on Hopper"
    return None
