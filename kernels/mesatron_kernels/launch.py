"""What the Triton kernels can take, and how long their chunks are on a GPU with so much shared memory.

The needs below are what compiling for sm_80 and sm_90 came to, the larger of the two and of all kernels;
tests/kernels/test_compiled.py compiles again and compares, and `python tests/kernels/compile_kernels.py 90 80 --all`
prints what to put here.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mesatron_kernels.triton_tiles import INTERPRETED

SHARED_BYTES = {(16, 64): (64, 40960), (16, 128): (64, 98304), (32, 64): (16, 49152), (32, 128): (16, 163840)}
"""(bits of q, k and v; head size) to the tokens of a chunk and the shared memory that they take."""
LARGEST_HEAD = max(size for _, size in SHARED_BYTES)
"""Channels of a head at most."""


def check_inputs(operator: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError, which names `operator`, for q, k and v [..., head size] that the kernels cannot take."""
    here = f"The triton implementation of {operator}"
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}; cast them alike.")
    if q.dtype == torch.float64:
        raise ValueError(f"{here} has no float64; choose torch or reference.")
    if not q.is_cuda and not INTERPRETED.value:
        raise ValueError(f"{here} needs tensors on a GPU; choose torch on a CPU.")
    for name, size in (("D", q.shape[-1]), ("Dv", v.shape[-1])):
        if size > LARGEST_HEAD or size % 16:
            raise ValueError(
                f"{here} takes head sizes that are multiples of 16 up to {LARGEST_HEAD}, but {name} is {size}; choose "
                "torch."
            )


def chunk_length(dtype: torch.dtype, head_size: int, shared_bytes: int) -> int:
    """Tokens of a chunk on a GPU with `shared_bytes` of shared memory a program (99 KiB on consumer cards, 163 on an
    A100, 227 on an H100).

    Head sizes between those of SHARED_BYTES take what the next larger takes. Raises ValueError where it does not fit.
    """
    bits = torch.finfo(dtype).bits
    length, need = SHARED_BYTES[bits, min(size for width, size in SHARED_BYTES if width == bits and size >= head_size)]
    if need > shared_bytes:
        raise ValueError(
            f"The triton implementation of mesa needs {need:,} bytes of shared memory for {dtype} and head size "
            f"{head_size}, but this GPU has {shared_bytes:,}; choose torch, 16 bits or smaller heads."
        )
    return length


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program can have on a GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
