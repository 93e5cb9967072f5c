"""Who shares what: this process's place in the tensor, context, data and pipeline groups of a run.

Ranks count tensor first, then context, data and pipeline: rank = t + T (c + C (d + D p)). megatron-core makes the
groups; DeepSpeed's pipeline topology numbers its processes in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from mesatron_data.batch import Batch

from mesatron.config import Config, data_parallel_size
from mesatron.parallel.distributed import COLLECTIVE_TIMEOUT, World


@dataclass(frozen=True)
class Group:
    """This process's place among those that share one thing; `handle` is None for all processes or this one alone."""

    rank: int = 0
    size: int = 1
    handle: Any = None


@dataclass(frozen=True)
class Layout:
    """This process's groups.

    tensor: share matrices and heads. context: share sequences. data: read different sequences. pipeline: share blocks.
    copies: data x context, those that hold the same parameters; DeepSpeed shards and averages over them.
    """

    world: World
    tensor: Group = Group()
    context: Group = Group()
    data: Group = Group()
    pipeline: Group = Group()
    copies: Group = Group()

    @property
    def is_last_stage(self) -> bool:
        """Whether this process computes losses; without a pipeline every one does."""
        return self.pipeline.rank == self.pipeline.size - 1

    def sum(self, *values: float, from_all: Sequence[float] = ()) -> list[float]:
        """Each value summed over pieces of the global batch, then those `from_all` over all processes, in float64.

        Processes that compute the same piece are counted once: of a tensor group the first, of a pipeline the last.
        """
        counted = self.tensor.rank == 0 and self.is_last_stage
        return self.world.sum(*(value if counted else 0.0 for value in values), *from_all)

    def piece(self, batch: Batch) -> Batch:
        """The tokens of `batch` that this process of its context group works on."""
        return batch.piece(self.context.rank, self.context.size) if self.context.size > 1 else batch

    def describe(self) -> str:
        """The sizes, and the ranks of every group that this process is in."""
        groups = {"tensor": self.tensor, "context": self.context, "data": self.data, "pipeline": self.pipeline}
        named = [
            f"{name} {group.size} (ranks {', '.join(map(str, _ranks(group, self.world)))})"
            for name, group in groups.items()
            if group.size > 1
        ]
        return " x ".join(named) or "one process"


def lay_out(config: Config, world: World) -> Layout:
    """Make the groups that `config.parallel` asks for; every process must call it.

    Raises ConfigError, before any group is made, when the sizes do not fit the number of processes.
    """
    parallel = config.parallel
    data_size = data_parallel_size(config, world.size)
    if data_size == world.size:
        everyone = Group(world.rank, world.size)
        return Layout(world, data=everyone, copies=everyone)
    from mesatron.parallel.megatron import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_size,
        pipeline_model_parallel_size=parallel.pipeline_size,
        context_parallel_size=parallel.context_size,
        distributed_timeout_minutes=round(COLLECTIVE_TIMEOUT.total_seconds() / 60),
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    return Layout(
        world,
        tensor=_group(parallel_state.get_tensor_model_parallel_group()),
        context=_group(parallel_state.get_context_parallel_group()),
        data=_group(parallel_state.get_data_parallel_group()),
        pipeline=_group(parallel_state.get_pipeline_model_parallel_group()),
        copies=_group(parallel_state.get_data_parallel_group(with_context_parallel=True)),
    )


class ModelParallelUnit:
    """A Layout in the words that DeepSpeed asks its `mpu` in (without a pipeline, whose grid is its own)."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def get_model_parallel_rank(self) -> int:
        return self._layout.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self._layout.tensor.size

    def get_model_parallel_group(self) -> Any:
        return self._layout.tensor.handle

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self._layout.copies.rank

    def get_data_parallel_world_size(self) -> int:
        return self._layout.copies.size

    def get_data_parallel_group(self) -> Any:
        return self._layout.copies.handle


def _group(handle: Any) -> Group:
    return Group(dist.get_rank(handle), dist.get_world_size(handle), handle)


def _ranks(group: Group, world: World) -> list[int]:
    return dist.get_process_group_ranks(group.handle) if group.handle is not None else list(range(world.size))
