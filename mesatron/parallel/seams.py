"""The seams of a model of which this process holds a share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from mesatron_kernels import MesaOutput
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mesatron.config import Config, ModelConfig
from mesatron.model.convolution import ShortConvolution
from mesatron.model.embedding import TiedEmbedding
from mesatron.model.seams import Seams
from mesatron.parallel.layout import Layout


class SharedSeams(Seams):
    """Tensor and context parallelism, where a layout has them, and recomputed activations, where the config asks."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self.layout = layout
        self.vocabulary_size = config.model.vocabulary_size
        self.recomputed = {"none": None, "selective": "mlp", "full": "block"}[config.train.activation_checkpointing]
        self.tensor = None
        if layout.tensor.size > 1:
            from mesatron.parallel.tensor import TensorParallel

            self.tensor = TensorParallel(config, layout.tensor)

        self.context = None
        if layout.context.size > 1:
            from mesatron.parallel.context import ContextParallel

            self.context = ContextParallel(config, layout.context)

    def embedding(self, config: ModelConfig) -> TiedEmbedding:
        if self.tensor is None:
            return super().embedding(config)
        return self.tensor.embedding(config, self.vocabulary_size)

    def enter(self, x: Tensor) -> Tensor:
        return self.tensor.enter(x) if self.tensor else x

    def leave(self, y: Tensor) -> Tensor:
        return self.tensor.leave(y) if self.tensor else y

    def run(self, part: Literal["block", "mlp"], function: Callable[..., Any], *inputs: Any) -> Any:
        if part != self.recomputed:
            return function(*inputs)
        # No random numbers are drawn, so their generators need not be kept.
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    def convolve(
        self, convolution: ShortConvolution, x: Tensor, history: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.context is None:
            return super().convolve(convolution, x, history, cu_seqlens)
        return self.context.convolve(convolution, x, cu_seqlens)

    def mesa(
        self, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, lam: Tensor, **how: Any
    ) -> MesaOutput:
        operator = self.context.mesa if self.context else super().mesa
        return operator(q, k, v, log_gamma, beta, lam, **how)
