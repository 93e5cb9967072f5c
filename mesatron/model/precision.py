"""Where bf16 is not enough."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32; in float64 if it is that already, so that the whole model can be checked in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
