"""The safetensors layout: where each tensor's bytes lie is known before there are any, so they can come in pieces.

Source: https://huggingface.co/docs/safetensors (format): 8 bytes with the header's length, a JSON header with each
tensor's type, shape and offsets, then the tensors' bytes without gaps. The library itself can only write tensors that
are all in memory at once.
"""

import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_ALIGNMENT_BYTES = 8


class TensorSpec(NamedTuple):
    """What is known of a tensor without its elements: its name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorSpec":
        return cls(name, tuple(tensor.shape), tensor.dtype)


class Fragment(NamedTuple):
    """Elements of one tensor that one process holds.

    kind, name: of the tensor in the checkpoint. values: flat, of the tensor's type, on any device. stretches: (element
    of the whole tensor, element of `values`, number of elements) of all that is to be saved; run through once.
    """

    kind: str
    name: str
    values: torch.Tensor
    stretches: Iterable[tuple[int, int, int]]

    @classmethod
    def whole(cls, kind: str, name: str, tensor: torch.Tensor) -> "Fragment":
        """All elements of a tensor."""
        return cls(kind, name, tensor.detach().reshape(-1), [(0, 0, tensor.numel())])


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor of any shape and type in row-major order; no copy for a contiguous one on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def encode_header(specs: Sequence[TensorSpec]) -> bytes:
    """The length and the JSON header of a file that holds these tensors in this order.

    Raises ValueError for a repeated name, or for a type wider than the one before it: the library maps the file into
    memory, where a wide element must not start at an odd address.
    """
    header = {}
    offset = 0
    for spec in specs:
        if spec.name in header or offset % spec.dtype.itemsize:
            raise ValueError(
                f"Tensor {spec.name} is repeated or misaligned: order the tensors from wide to narrow types."
            )
        header[spec.name] = {
            "dtype": DTYPE_CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.size_bytes],
        }
        offset += spec.size_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text
