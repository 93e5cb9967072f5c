"""The tied embedding: tokens in, logits or losses out, one weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mesatron.model.parameter import make_parameter
from mesatron.model.precision import at_least_fp32


class TiedEmbedding(nn.Module):
    """Token embedding and output layer with one weight [vocabulary, width] (paper section E.1).

    Both directions go through `forward`, so that whoever shards the weight (ZeRO-3) sees every use of it.
    """

    def __init__(self, vocabulary_size: int, width: int, logit_cap: float) -> None:
        super().__init__()
        self.width = width
        self.logit_cap = logit_cap
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
            return self._logits(x)
        hidden, flat = x.reshape(-1, self.width), targets.reshape(-1)
        losses = [
            checkpoint(self._losses, h, t, use_reentrant=False)
            for h, t in zip(hidden.split(chunk_tokens), flat.split(chunk_tokens), strict=True)
        ]
        return torch.cat(losses).view(targets.shape)

    def _rows(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = at_least_fp32(F.linear(hidden, self.weight))
        return self.logit_cap * torch.tanh(logits / self.logit_cap)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(hidden), targets, reduction="none")
