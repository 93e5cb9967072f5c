"""The safetensors layout, written as a stream: one tensor in memory at a time.

Source: https://huggingface.co/docs/safetensors (format): 8 bytes with the header's length, a JSON header with each
tensor's type, shape and offsets, then the tensors' bytes without gaps. The library itself can only write tensors that
are all in memory at once. Reading is left to the library.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from mesatron.files import write_all

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
_ALIGNMENT_BYTES = 8


class TensorSpec(NamedTuple):
    """What is known of a tensor before it is gathered: its name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorSpec":
        return cls(name, tuple(tensor.shape), tensor.dtype)


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


def write_stream(
    descriptor: int, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> tuple[str, dict[str, str]]:
    """Write the tensors as they arrive; return the SHA-256 of the whole file and of each tensor's bytes.

    `tensors` must yield exactly the tensors of `specs`, in their order, and is run to its end (it may hold collectives
    that other ranks wait for). Raises ValueError if one differs from its specification.
    """
    header = encode_header(specs)
    file_digest = hashlib.sha256(header)
    tensor_digests = {}
    write_all(descriptor, header)
    for spec, (name, tensor) in zip(specs, tensors, strict=True):
        if TensorSpec.of(name, tensor) != spec:
            raise ValueError(f"Expected {spec}, got {TensorSpec.of(name, tensor)}.")
        data = tensor_bytes(tensor)
        file_digest.update(data)
        tensor_digests[name] = hashlib.sha256(data).hexdigest()
        write_all(descriptor, data)
    return file_digest.hexdigest(), tensor_digests
