"""Tensor and sequence parallelism: every process holds some heads, MLP channels and rows of the vocabulary.

A mixer or MLP of a share of the heads or channels gives a share of the sum that its output projection forms. So a
model built with the share's sizes is right once its input's gradient and its output are summed over the tensor-parallel
group: one collective each way per mixer and MLP, whatever the number of projections inside (Megatron-LM, arXiv
1909.08053). With sequence parallelism (arXiv 2205.05198) the stream between is split by tokens, and gathers and
reduce-scatters of the same total size take the sums' place.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from mesatron.config import Config, ModelConfig
from mesatron.model import fused
from mesatron.model.embedding import TiedEmbedding
from mesatron.parallel.layout import Group
from mesatron.parallel.megatron import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class TensorParallel:
    """The collectives around what a tensor-parallel group shares.

    With sequence parallelism the residual stream between `leave` and `enter` is [1, B T / size, width]: a share of all
    tokens, counted through the micro-batch.
    """

    def __init__(self, config: Config, group: Group) -> None:
        self.group = group
        self.by_tokens = config.parallel.sequence_parallel
        # Documents come with all sequences in one row, else each sequence is a row.
        one_row = config.data.reset_state_at_documents
        self.row_length = -1 if one_row else config.data.context_length // config.parallel.context_size

    def embedding(self, share: ModelConfig, vocabulary_size: int) -> TiedEmbedding:
        """The rows of a tied embedding of `vocabulary_size` that this process holds."""
        return VocabularyParallelEmbedding(share, vocabulary_size, self)

    def enter(self, x: Tensor) -> Tensor:
        """The tokens that a share of the heads or channels works on: all of them; gradients are summed."""
        if self.by_tokens:
            x = gather_from_sequence_parallel_region(x.squeeze(0))
            x = x.view(1, -1, x.shape[-1]) if self.row_length < 0 else x.view(-1, self.row_length, x.shape[-1])
        else:
            x = copy_to_tensor_model_parallel_region(x)
        if x.requires_grad:
            x.register_hook(Tensor.contiguous)  # megatron-core sums a copy of any other gradient, and loses it
        return x

    def leave(self, y: Tensor) -> Tensor:
        """The sum of all shares [B, T, width], or the part of it that this process keeps."""
        y = y.contiguous()
        if self.by_tokens:
            return reduce_scatter_to_sequence_parallel_region(y.flatten(0, 1)).unsqueeze(0)
        return reduce_from_tensor_model_parallel_region(y)

    def combine(self, scores: Tensor) -> Tensor:
        """Scores [2, N] of the whole vocabulary from every process's of its words, see `fused.linear_scores`.

        Every process goes on to the same losses, so each has the gradient of its own scores without asking the others.
        """
        every = scores.new_empty(self.group.size, *scores.shape)
        dist.all_gather_into_tensor(every, scores.detach()[None], group=self.group.handle)
        every[self.group.rank] = scores  # known to autograd, which what was gathered is not
        # Where no process has the target the gradient is no number, which goes no further: nothing here depends on it.
        return every.logsumexp(0)


class VocabularyParallelEmbedding(TiedEmbedding):
    """A TiedEmbedding of which this process holds a run of rows; those beyond the vocabulary are never scored."""

    def __init__(self, share: ModelConfig, vocabulary_size: int, tensor: TensorParallel) -> None:
        super().__init__(share.vocabulary_size, share.width, share.logit_cap, share.implementation)
        self.rows = share.vocabulary_size
        self.first_row = tensor.group.rank * share.vocabulary_size
        self.words = min(max(vocabulary_size - self.first_row, 0), self.rows)
        self.tensor = tensor

    def _rows(self, tokens: Tensor) -> Tensor:
        row = tokens - self.first_row
        elsewhere = (row < 0) | (row >= self.rows)
        return self.tensor.leave(super()._rows(row.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0.0))

    def _losses(self, hidden: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        scores = fused.linear_scores(
            hidden, self.weight, targets - self.first_row, self.words, self.logit_cap, chunk_tokens, self.implementation
        )
        return fused.losses(self.tensor.combine(scores), targets)
