"""How long the chunks of the Triton kernels may be on a GPU with so much shared memory.

The needs below are what compiling for sm_80 and sm_90 came to, the larger of the two and of all kernels;
tests/kernels/test_compiled.py compiles again and compares, and `python tests/kernels/compile_kernels.py 90 80 --all`
prints what to put here.
"""

from __future__ import annotations

import torch

SHARED_BYTES = {
    (16, 64): {64: 40960},
    (16, 128): {64: 98304},
    (32, 64): {16: 49152},
    (32, 128): {16: 163840},
}
"""(bits of q, k and v; head size) to chunk lengths, the fastest first, and the shared memory that they take."""


def chunk_length(dtype: torch.dtype, head_size: int, shared_bytes: int) -> int:
    """Tokens of a chunk, the fastest that fits into `shared_bytes` a program (99 KiB on consumer cards, 163 on an A100,
    227 on an H100).

    Head sizes between those of SHARED_BYTES take what the next larger takes. Raises ValueError where nothing fits.
    """
    bits = torch.finfo(dtype).bits
    size = min(size for width, size in SHARED_BYTES if width == bits and size >= head_size)
    needs = SHARED_BYTES[bits, size]
    for length, need in needs.items():
        if need <= shared_bytes:
            return length
    raise ValueError(
        f"The triton implementation of mesa needs {min(needs.values()):,} bytes of shared memory for {dtype} and head "
        f"size {head_size}, but this GPU has {shared_bytes:,}; choose torch, 16 bits or smaller heads."
    )


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program can have on a GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
