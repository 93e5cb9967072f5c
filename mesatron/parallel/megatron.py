"""What is used of megatron-core: its process groups and the collectives of tensor parallelism, on CPUs too.

Importing it takes seconds, so only layouts that need it do.
"""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Transformer Engine and Apex are not installed", UserWarning)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

if not torch.cuda.is_available():
    # Megatron allocates the results of its gathers on torch.cuda.current_device(), which raises without a GPU.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]

__all__ = [
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
]
