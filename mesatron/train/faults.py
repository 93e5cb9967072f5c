"""The faults a training ends with: errors of libraries as the project reports them, and a stop that was asked for."""

from __future__ import annotations

import torch

from mesatron.config import Config
from mesatron.errors import REPORTED, MemoryExhaustedError, PeerLostError, StoppedEarly, foreseen
from mesatron.parallel import distributed
from mesatron.parallel.distributed import World


def stopped(step: int, config: Config) -> StoppedEarly:
    """The end at `--stop-at-step`."""
    return StoppedEarly(
        f"Stopped as asked after step {step} of {config.train.steps}, which is saved; "
        "the same command without --stop-at-step goes on from there."
    )


def as_reported(error: BaseException, config: Config, world: World) -> BaseException:
    """The fault to report for an error of a library; any other is itself."""
    if distributed.is_lost_peer(error):  # first: it may look like a fault of the data that were being opened
        return PeerLostError(f"another process than rank {world.rank} ended")
    if isinstance(error, REPORTED):
        return error
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return MemoryExhaustedError(
            f"{config.train.micro_batch_size} sequences of {config.data.context_length} tokens at a time (or "
            f"{config.evaluate.micro_batch_size} in validation) do not fit into the memory of {world.device}; lower "
            "train.micro_batch_size or evaluate.micro_batch_size, or raise parallel.zero_stage."
        )
    return foreseen(error) or error
