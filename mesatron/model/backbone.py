"""The decoder: tied embedding, blocks of mixer and MLP, final norm (paper sections E.1 and G.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mesatron.config import ModelConfig
from mesatron.model.mixers import build_mixer
from mesatron.model.mlp import MLP
from mesatron.model.norm import RMSNorm
from mesatron.model.seams import Seams


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, seams: Seams, layer: int = 0) -> None:
        super().__init__()
        self.seams = seams
        self.mixer_norm = RMSNorm((config.width,), config.norm_epsilon, config.implementation)
        self.mixer = build_mixer(config, seams, layer)
        self.mlp_norm = RMSNorm((config.width,), config.norm_epsilon, config.implementation)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, state: Any = None, cu_seqlens: Tensor | None = None, keep_state: bool = False
    ) -> tuple[Tensor, Any]:
        """x [B, T, width] and the mixer's state before it (None: empty) to the new x and, if kept, the state after."""
        mixed, state = self.mixer(self.seams.enter(self.mixer_norm(x)), state, cu_seqlens, keep_state)
        x = x + self.seams.leave(mixed)
        return x + self.seams.run("mlp", self._mlp, x), state

    def _mlp(self, x: Tensor) -> Tensor:
        return self.seams.leave(self.mlp(self.seams.enter(self.mlp_norm(x))))


class Backbone(nn.Module):
    """A language model around any mixer."""

    def __init__(self, config: ModelConfig, seams: Seams | None = None) -> None:
        super().__init__()
        self.config, self.seams = config, seams or Seams()
        self.embedding = self.seams.embedding(config)
        self.blocks = nn.ModuleList(Block(config, self.seams, layer) for layer in range(config.layers))
        self.norm = RMSNorm((config.width,), config.norm_epsilon, config.implementation)

    def forward(
        self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, chunk_tokens: int = 8192
    ) -> Tensor:
        """The fp32 loss [B, T] of predicting `targets` from `tokens`, both int64 [B, T]; 0 where a target is ignored.

        `cu_seqlens` int32 [N+1]: starts of documents (and of every sequence) among the B*T tokens in a row; mixers
        then begin each with an empty state. Without it every sequence is one document.
        """
        shape = tokens.shape
        if cu_seqlens is not None:
            tokens = tokens.reshape(1, -1)
        hidden = self.seams.enter(self.hidden(tokens, cu_seqlens))
        return self.embedding(hidden, targets.view(tokens.shape), chunk_tokens).view(shape)

    def hidden(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """The normed residual stream [B, T, width] after the last block; with `cu_seqlens` B is 1."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = self.seams.run("block", block, x, None, cu_seqlens)
        return self.norm(x)

    def observed(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """What the mixers saw in the last forward pass, by tag: scalars, and tensors to look at as distributions."""
        return observed_by(dict(enumerate(self.blocks)))

    def decode(self, tokens: Tensor, states: list[Any] | None = None) -> tuple[Tensor, list[Any]]:
        """fp32 logits [B, vocabulary] after the last of `tokens` [B, T] and the state of every layer.

        `states` continue an earlier call; their size does not depend on how many tokens went before, except where the
        mixer is softmax attention without a window.
        """
        x = self.embedding(tokens)
        after = []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, state, keep_state=True)
            after.append(state)
        return self.embedding(self.norm(x[:, -1])), after


def observed_by(blocks: Mapping[int, nn.Module]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """What the mixers of `blocks`, by number of layer, saw in their last forward pass, see `Backbone.observed`."""
    scalars: dict[str, float] = {}
    distributions: dict[str, Tensor] = {}
    for number, block in blocks.items():
        numbers, tensors = block.mixer.observed()  # type: ignore[union-attr, operator]
        scalars |= {f"{name}/layer_{number:02d}": value for name, value in numbers.items()}
        distributions |= {f"{name}/layer_{number:02d}": value for name, value in tensors.items()}
    return scalars, distributions
