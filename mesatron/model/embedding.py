"""The tied embedding: tokens in, logits or losses out, one weight."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mesatron.model import fused
from mesatron.model.parameter import make_parameter


class TiedEmbedding(nn.Module):
    """Token embedding and output layer with one weight [vocabulary, width] (paper section E.1).

    Both directions go through `forward`, so that whoever shards the weight (ZeRO-3) sees every use of it.
    """

    def __init__(self, vocabulary_size: int, width: int, logit_cap: float, implementation: str = "auto") -> None:
        super().__init__()
        self.width = width
        self.logit_cap = logit_cap
        self.implementation = implementation
        self.weight = make_parameter(vocabulary_size, width, std=width**-0.5, weight_decay=False)

    def forward(self, x: Tensor, targets: Tensor | None = None, chunk_tokens: int = 8192) -> Tensor:
        """One of three: integer tokens [...] to embeddings [..., width]; hidden states [..., width] to fp32 logits.

        With `targets` [...], hidden states become the fp32 loss of every position [...] (0 where the target is
        -100, torch's ignored index), with the logits of only `chunk_tokens` positions in memory at a time.
        """
        if not x.is_floating_point():
            # The weight starts at fan-in variance; the factor brings the residual stream to variance 1.
            return self._rows(x) * self.width**0.5
        if targets is None:
            return fused.capped(F.linear(x, self.weight), self.logit_cap)
        hidden, flat = x.reshape(-1, self.width), targets.reshape(-1)
        return self._losses(hidden, flat, chunk_tokens).view(targets.shape)

    def _rows(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def _losses(self, hidden: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        """fp32 losses [N] of hidden [N, width] and targets [N]."""
        return fused.linear_loss(hidden, self.weight, targets, self.logit_cap, chunk_tokens, self.implementation)
