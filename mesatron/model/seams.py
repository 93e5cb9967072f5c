"""The places where a model that is spread over processes differs from a whole one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from mesatron.config import ModelConfig
from mesatron.model.attention import Attention
from mesatron.model.convolution import ShortConvolution
from mesatron.model.embedding import TiedEmbedding
from mesatron.model.recurrences import Output, Recurrence
from mesatron.model.recurrences.recurrence import starts_of


class Seams:
    """What stands at these places in a whole model, which is nothing. Others may compute a share of it.

    A mixer or MLP between `enter` and `leave` may hold a share of the heads or channels; `lend` with `convolve`,
    `announce` with `recur`, and `attend` are where a mixer looks at other tokens, which may lie elsewhere.
    """

    def embedding(self, config: ModelConfig) -> TiedEmbedding:
        """The tied embedding of a model."""
        return TiedEmbedding(config.vocabulary_size, config.width, config.logit_cap, config.implementation)

    def enter(self, x: Tensor) -> Tensor:
        """Normed residual stream [B, T, width] on its way into a mixer, an MLP or the output layer."""
        return x

    def leave(self, y: Tensor) -> Tensor:
        """What a mixer or MLP adds to the residual stream [B, T, width]."""
        return y

    def run(self, part: Literal["block", "mlp"], function: Callable[..., Any], *inputs: Any) -> Any:
        """A block, or the MLP branch of one, whose activations may be made again in the backward pass."""
        return function(*inputs)

    def lend(self, inputs: Sequence[Tensor], tokens: int, cu_seqlens: Tensor | None) -> Sequence[Any]:
        """Begin to tell others the last tokens of these inputs [B, T, C] of convolutions; what this returns for each
        goes into `convolve`, after work that does not need it."""
        return [None] * len(inputs)

    def convolve(
        self, convolution: ShortConvolution, x: Tensor, history: Tensor | None, cu_seqlens: Tensor | None, lent: Any
    ) -> tuple[Tensor, Tensor]:
        """`convolution` of x [B, T, C]: heads, and what comes before the tokens that follow."""
        return convolution(x, history, cu_seqlens)

    def announce(self, recurrence: Recurrence, inputs: Any, cu_seqlens: Tensor | None) -> Any:
        """Begin to tell others what tokens do to a state; what this returns goes into `recur`, after work that does not
        need it. `inputs` are those of `recur`, but for q, which may be anything here."""

    def recur(
        self, recurrence: Recurrence, inputs: Any, initial_state: Any, cu_seqlens: Tensor | None, return_state: bool,
        announced: Any,
    ) -> Output:  # fmt: skip
        """`recurrence` of `inputs`, see there."""
        return recurrence(inputs, initial_state, cu_seqlens, return_state)

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """`attention` of q [B, T, h, D], the last T of the tokens of k and v [B, S, h, D]."""
        segments = None
        if cu_seqlens is not None:
            segments = starts_of(cu_seqlens, 1, k.shape[1], k.device).cumsum(1)
        return attention(q, k, v, segments)
