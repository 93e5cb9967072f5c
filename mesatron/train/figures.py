"""Figures of a step beside its loss: sequences, sources, mixers, memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch
from mesatron_data.batch import IGNORED_TARGET, Batch
from torch import Tensor

from mesatron.parallel.layout import Layout
from mesatron.parallel.zero import ZeroEngine


def checksum(sample_ids: Tensor) -> float:
    """A number that tells sets of sequences apart whatever their order; sums over processes stay exact in float64."""
    mixed = (sample_ids.long() + 1) * 0x9E3779B1 % 2**32
    return float((mixed * mixed % 2**36).sum())


def count_sources(micro_batches: Sequence[Batch], sources: int) -> list[int]:
    """Targets of each source in this process's part of a step."""
    present = torch.cat([part.sources[part.targets != IGNORED_TARGET] for part in micro_batches]).long()
    return torch.bincount(present, minlength=sources).tolist()


def by_source(
    sources: Sequence[str], losses: Sequence[float], targets: Sequence[float], asked: dict[str, float]
) -> dict[str, float]:
    """A step's loss by source, from sums of losses and numbers of targets, and the shares it has and should have."""
    scalars: dict[str, float] = {}
    for name, loss, count in zip(sources, losses, targets, strict=True):
        if count:
            scalars[f"train/loss_by_source/{name}"] = loss / count
        scalars[f"mixture/achieved/{name}"] = count / sum(targets)
        scalars[f"mixture/asked/{name}"] = asked.get(name, 0.0)
    return scalars


def observe(engine: ZeroEngine, layout: Layout, histograms: bool) -> tuple[dict[str, float], dict[str, Tensor]]:
    """What the mixers saw, of every layer in the first process that holds it; complete in the first process.

    Scalars, and tensors to show as histograms, which are empty unless `histograms`. All processes call it together.
    """
    leads = layout.tensor.rank == 0 and layout.copies.rank == 0
    scalars, distributions = engine.observed() if leads else ({}, {})
    if not histograms:
        distributions = {}
    if layout.pipeline.size > 1:
        own = scalars, {tag: x.cpu() for tag, x in distributions.items()}
        for other_scalars, others in layout.world.gather(own):
            scalars, distributions = scalars | other_scalars, distributions | others
    return scalars, distributions


def memory(device: torch.device, besides: int = 0) -> tuple[float, float]:
    """Bytes: the most that tensors have taken of this process's GPU, and what all, NCCL and CUDA too, take of it now.

    besides: of this process's GPU, taken the whole time although torch does not count them as a tensor's.

    Without a GPU, the most that the process has taken of the host, and 0.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(torch.cuda.max_memory_allocated(device) + besides), float(total - free)
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit), 0.0
