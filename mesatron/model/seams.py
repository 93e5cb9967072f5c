"""The places where a model that is spread over processes differs from a whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from mesatron_kernels import MesaOutput, mesa
from torch import Tensor

from mesatron.config import ModelConfig
from mesatron.model.convolution import ShortConvolution
from mesatron.model.embedding import TiedEmbedding


class Seams:
    """What stands at these places in a whole model, which is nothing. Others may compute a share of it.

    A mixer or MLP between `enter` and `leave` may hold a share of the heads or channels; `convolve` and `mesa` are
    where a mixer looks at other tokens, which may lie elsewhere.
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

    def convolve(
        self, convolution: ShortConvolution, x: Tensor, history: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`convolution` of x [B, T, C]: heads, and what comes before the tokens that follow."""
        return convolution(x, history, cu_seqlens)

    def mesa(
        self, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, lam: Tensor, **how: Any
    ) -> MesaOutput:
        """`mesatron_kernels.mesa`."""
        return mesa(q, k, v, log_gamma, beta, lam, **how)
