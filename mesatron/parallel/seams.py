"""The seams of a model of which this process holds a share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mesatron.config import Config, ModelConfig
from mesatron.model.attention import Attention
from mesatron.model.convolution import ShortConvolution
from mesatron.model.embedding import TiedEmbedding
from mesatron.model.recurrences import Output, Recurrence
from mesatron.model.seams import Seams
from mesatron.parallel.layout import Layout

if TYPE_CHECKING:
    from mesatron.parallel.graphs import BlockGraphs


class SharedSeams(Seams):
    """Tensor and context parallelism, where a layout has them, and recomputed activations, where the config asks.

    graphs: what blocks are replayed from in training, once there is any.
    """

    graphs: BlockGraphs | None = None

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

    def residual_shape(self, rows: int, config: Config) -> tuple[int, int, int]:
        """[B, T, width] of this process's residual stream in a micro-batch of so many rows without documents."""
        length, width = config.data.context_length // self.layout.context.size, config.model.width
        if config.parallel.sequence_parallel:
            return 1, rows * length // self.layout.tensor.size, width
        return rows, length, width

    def embedding(self, config: ModelConfig) -> TiedEmbedding:
        if self.tensor is None:
            return super().embedding(config)
        return self.tensor.embedding(config, self.vocabulary_size)

    def enter(self, x: Tensor) -> Tensor:
        return self.tensor.enter(x) if self.tensor else x

    def leave(self, y: Tensor) -> Tensor:
        return self.tensor.leave(y) if self.tensor else y

    def run(self, part: Literal["block", "mlp"], function: Callable[..., Any], *inputs: Any) -> Any:
        if part == "block" and self.graphs is not None:
            x, _, cu_seqlens = inputs
            if self.graphs.take(x, cu_seqlens):
                block: Any = getattr(function, "__self__", function)  # a stage's block gives its own bound `forward`
                return self.graphs.run(block, x), None
        if part != self.recomputed:
            return function(*inputs)
        # No random numbers are drawn, so their generators need not be kept.
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    def lend(self, inputs: Sequence[Tensor], tokens: int, cu_seqlens: Tensor | None) -> Sequence[Any]:
        if self.context is None:
            return super().lend(inputs, tokens, cu_seqlens)
        return self.context.lend(inputs, tokens, cu_seqlens)

    def convolve(
        self, convolution: ShortConvolution, x: Tensor, history: Tensor | None, cu_seqlens: Tensor | None, lent: Any
    ) -> tuple[Tensor, Tensor]:
        if self.context is None:
            return super().convolve(convolution, x, history, cu_seqlens, lent)
        return self.context.convolve(convolution, x, cu_seqlens, lent)

    def announce(self, recurrence: Recurrence, inputs: Any, cu_seqlens: Tensor | None) -> Any:
        return self.context.announce(recurrence, inputs, cu_seqlens) if self.context else None

    def recur(
        self, recurrence: Recurrence, inputs: Any, initial_state: Any, cu_seqlens: Tensor | None, return_state: bool,
        announced: Any,
    ) -> Output:  # fmt: skip
        if self.context is None:
            return super().recur(recurrence, inputs, initial_state, cu_seqlens, return_state, announced)
        return self.context.recur(recurrence, inputs, announced)

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        if self.context is None:
            return super().attend(attention, q, k, v, cu_seqlens)
        return self.context.attend(attention, q, k, v, cu_seqlens)
