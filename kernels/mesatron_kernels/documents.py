"""Bounds of packed documents on the host, and what has been made of them.

Every layer asks for the same, there and back; to read them from a GPU is to wait for all that is under way there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Made = TypeVar("Made")


class Documents:
    """bounds: int64 [N + 1] on the host."""

    def __init__(self, bounds: Tensor) -> None:
        self.bounds = bounds.to(torch.int64, copy=True)  # what is kept of a tensor may not keep it
        self._made: dict[Hashable, Any] = {}

    def made(self, what: Hashable, make: Callable[[Tensor], Made]) -> Made:
        """Return make(bounds), kept under the name `what`, which says all that it depends on besides."""
        if what not in self._made:
            self._made[what] = make(self.bounds)
        return self._made[what]


_known: Any = WeakTensorKeyDictionary()  # to the documents, and the version of the tensor that they are of


def documents_of(cu_seqlens: Tensor) -> Documents:
    """The documents with bounds `cu_seqlens` [N + 1], read once as long as that tensor lives and is not written to."""
    known = _known.get(cu_seqlens)
    if known is None or known[1] != _version(cu_seqlens):
        known = _known[cu_seqlens] = Documents(cu_seqlens.cpu()), _version(cu_seqlens)
    return known[0]


def send_documents(bounds: Tensor, device: torch.device) -> Tensor:
    """`bounds` of the host on `device`, from where they need not be read."""
    cu_seqlens = sent(bounds, device)
    _known[cu_seqlens] = Documents(bounds), _version(cu_seqlens)
    return cu_seqlens


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, without a wait for the work that is under way there."""
    # torch keeps the page-locked copy until it has been sent.
    locked = x.pin_memory() if device.type == "cuda" else x
    return locked.to(device, non_blocking=True)


def _version(x: Tensor) -> int | None:
    """Counts what was written to a tensor; None, and no reason to read it again, where that is not counted."""
    return None if x.is_inference() else x._version
