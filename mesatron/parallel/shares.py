"""Which part of every whole parameter a process holds, told from the shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model.backbone import Backbone
from mesatron.model.parameter import ParameterInfo
from mesatron.parallel.layout import Group

ROWS = 64
"""Products over other than multiples of so many words, such as 25,129, run at a fraction of a GPU's rate."""


@dataclass(frozen=True)
class Share:
    """Part of a parameter of shape `whole`: all of it, or along `dimension` the group.rank-th of group.size equal runs.

    The last runs may reach beyond the whole, which is then filled up with zeros.
    """

    whole: torch.Size
    info: ParameterInfo
    local: torch.Size
    group: Group
    dimension: int | None

    def cut(self, value: Tensor) -> Tensor:
        """This process's part of a whole tensor."""
        if self.dimension is None:
            return value
        length = self.local[self.dimension]
        beyond = length * self.group.size - self.whole[self.dimension]
        filled = F.pad(value, [0, 0] * (value.ndim - 1 - self.dimension) + [0, beyond])
        return filled.narrow(self.dimension, self.group.rank * length, length)

    def stretches(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where elements `start` to `stop` of this process's part, in row-major order, lie in the whole tensor.

        Yields (element of the whole, element counted from `start`, number of elements); what reaches beyond the whole
        lies nowhere and is left out.
        """
        if self.dimension is None:
            rows, row, whole_row, first = 1, self.local.numel(), self.whole.numel(), 0
            real = row
        else:
            inner = math.prod(self.whole[self.dimension + 1 :])
            row, whole_row = self.local[self.dimension] * inner, self.whole[self.dimension] * inner
            rows, first = self.local.numel() // row, self.group.rank * row
            real = min(row, whole_row - first)
        for number in range(start // row, min(-(-stop // row), rows)):
            begin, end = max(start, number * row), min(stop, number * row + real)
            if begin < end:
                yield number * whole_row + first + begin - number * row, begin - start, end - begin


def share_of(model: ModelConfig, tensor_size: int) -> ModelConfig:
    """The sizes of one process's share of `model`; the last shares of the words may reach beyond the vocabulary."""
    words = -(-model.vocabulary_size // tensor_size)
    if tensor_size > 1 and words >= ROWS:
        words += -words % ROWS
    return model.model_copy(
        update={
            "vocabulary_size": words,
            "heads": model.heads // tensor_size,
            "mlp_ratio": model.mlp_width // tensor_size / model.width,
        }
    )


def whole_parameters(config: ModelConfig) -> dict[str, nn.Parameter]:
    """Every parameter of the unshared model by name, without its memory."""
    with torch.device("meta"):
        return dict(Backbone(config).named_parameters())


def shares(whole: Mapping[str, nn.Parameter], local: Mapping[str, torch.Size], tensor: Group) -> dict[str, Share]:
    """The share that each of the `local` shapes is of the parameter of its name: it is cut where they differ."""
    found = {}
    for name, shape in local.items():
        parameter = whole[name]
        cuts = [d for d, (all_of_it, here) in enumerate(zip(parameter.shape, shape, strict=True)) if all_of_it != here]
        dimension = cuts[0] if cuts else None
        found[name] = Share(parameter.shape, parameter.info, shape, tensor, dimension)  # type: ignore[attr-defined]
    return found
