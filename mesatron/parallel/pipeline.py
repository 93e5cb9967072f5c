"""Pipeline parallelism: every process holds a run of whole blocks, micro-batches flow through them (DeepSpeed's 1F1B).

The first stage embeds, the last one scores with the same weight, whose two copies DeepSpeed keeps equal by summing
their gradients. Context parallelism lies inside DeepSpeed's data axis.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from mesatron_data.batch import Batch
from mesatron_kernels.documents import documents_of, send_documents
from torch import Tensor, nn
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model.backbone import Block, observed_by
from mesatron.model.embedding import TiedEmbedding
from mesatron.model.norm import RMSNorm
from mesatron.model.seams import Seams
from mesatron.parallel.shares import share_of
from mesatron.parallel.zero import StepResult, ZeroEngine
from mesatron.train.timing import PhaseTimer

EMBEDDING = "embedding"
Carried = Tensor | tuple[Tensor, Tensor]
"""What stages hand on: hidden states, and cu_seqlens where documents are told apart."""


def stage_bounds(config: ModelConfig, stages: int) -> list[int]:
    """First block of every stage, and the number of blocks at the end: [stages + 1].

    The output layer costs as much as the blocks that have as many parameters, so the last stage gets fewer of them;
    which number is found by trying all.
    """
    embedding = config.vocabulary_size * config.width
    output_in_blocks = embedding / ((config.parameter_count() - embedding) / config.layers)

    def slowest(in_last: int) -> float:
        return max(-(-(config.layers - in_last) // (stages - 1)), in_last + output_in_blocks)

    in_last = min(range(1, config.layers - stages + 2), key=slowest)
    others = config.layers - in_last
    return [others * stage // (stages - 1) for stage in range(stages)] + [config.layers]


class StageBlock(Block):
    """A Block that takes and gives what stages hand on."""

    def forward(self, carried: Carried) -> Carried:  # type: ignore[override]
        x, cu_seqlens = carried if isinstance(carried, tuple) else (carried, None)
        starts = None if cu_seqlens is None else _unpadded(cu_seqlens)
        x, _ = self.seams.run("block", super().forward, x, None, starts)
        return x if cu_seqlens is None else (x, cu_seqlens)


def _unpadded(cu_seqlens: Tensor) -> Tensor:
    """Without the empty documents at the end, for each of which an operator might keep a state."""

    def make(bounds: Tensor) -> Tensor:
        return send_documents(bounds.unique_consecutive(), cu_seqlens.device)

    return documents_of(cu_seqlens).made("without padding", make)


class StageNorm(RMSNorm):
    """The final norm, which ends the documents' way."""

    def forward(self, carried: Carried) -> Tensor:  # type: ignore[override]
        return super().forward(carried[0] if isinstance(carried, tuple) else carried)


class EmbeddingSpec(TiedLayerSpec):
    """The embedding, at either end of the model."""

    def __init__(self, config: ModelConfig, seams: Seams, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__(EMBEDDING, TiedEmbedding, config, seams, forward_fn=forward)

    def build(self, log: bool = False) -> TiedEmbedding:
        config, seams = self.module_args
        return seams.embedding(config)


def _embed(embedding: nn.Module, inputs: Carried) -> Carried:
    if not isinstance(inputs, tuple):
        return embedding(inputs)
    tokens, cu_seqlens = inputs
    return embedding(tokens.reshape(1, -1)), cu_seqlens


class Stages(PipelineModule):
    """The layers embedding, blocks, norm, embedding of a share of a model, cut into stages at `bounds`.

    `score` makes the losses of a micro-batch from the embedding and the last hidden states; `loss` their sum.
    """

    def __init__(
        self, config: ModelConfig, seams: Seams, bounds: list[int], topology: Any,
        score: Callable[[nn.Module, Tensor], Tensor], loss: Callable[[Tensor, None], Tensor],
    ) -> None:  # fmt: skip
        layers = [
            EmbeddingSpec(config, seams, _embed),
            *(LayerSpec(StageBlock, config, seams, layer) for layer in range(config.layers)),
            LayerSpec(StageNorm, (config.width,), config.norm_epsilon, config.implementation),
            EmbeddingSpec(config, seams, score),
        ]
        self.parts = [0, *(bound + 1 for bound in bounds[1:-1]), len(layers)]
        super().__init__(layers, topology=topology, loss_fn=loss)

    def _partition_layers(self, method: str = "") -> None:
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])


class PipelineEngine(ZeroEngine):
    """One stage of a model. Every process gets the same micro-batches; the last stage computes the losses."""

    def _build(self) -> tuple[nn.Module, None]:
        layout, model = self.layout, self.config.model
        topology = PipeModelDataParallelTopology(layout.pipeline.size, layout.tensor.size, layout.copies.size)
        bounds = stage_bounds(model, layout.pipeline.size)
        share = share_of(model, layout.tensor.size)
        # DeepSpeed lists the layers, and makes the tied weights equal in a way that would otherwise enter the graph.
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            return Stages(share, self.seams, bounds, topology, self._score, self._loss), None  # whose grid is its mpu

    def _whole_name(self, name: str) -> str:
        layer, _, rest = name.partition(".")
        if layer == "tied_modules":
            return rest
        number = int(layer) - 1
        return f"blocks.{number}.{rest}" if number < self.config.model.layers else f"norm.{rest}"

    def _saves(self, name: str) -> bool:
        tied_copy = name.startswith(EMBEDDING) and self.layout.pipeline.rank > 0
        return super()._saves(name) and not tied_copy

    def blocks(self) -> dict[int, Block]:
        return {int(n) - 1: b for n, b in self.engine.module.named_children() if isinstance(b, StageBlock)}

    def observed(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        return observed_by(self.blocks())

    @property
    def _in_flight(self) -> int:
        return min(self.layout.pipeline.size - self.layout.pipeline.rank, self.accumulation_steps)

    def losses(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor) -> Tensor:
        """As in ZeroEngine, in the last stage; zeros in the others."""
        self.engine.total_loss = None
        self.token_losses = torch.zeros(targets.shape)
        flow = self._flow([(tokens, targets, cu_seqlens)])
        self.engine.eval_batch(flow, reduce_output=None, bcast_loss=False, num_micro_batches=1)
        return self.token_losses

    def update(
        self, micro_batches: Sequence[Batch], global_targets: float, lr: float, timer: PhaseTimer
    ) -> tuple[Tensor, StepResult]:
        """As in ZeroEngine; forward, backward and step are one schedule."""
        self._set_lr(lr)
        self.loss_sum = torch.zeros((), device=self.device)
        self.source_losses.zero_()
        self.sources = iter([batch.sources for batch in micro_batches])
        # DeepSpeed divides by the number of micro-batches, and averages over copies.
        self.loss_factor = len(micro_batches) * self.layout.copies.size / global_targets
        with timer.phase("pipeline"), self._timing_blocks(timer):
            self.engine.train_batch(self._flow([(b.tokens, b.targets, b.cu_seqlens) for b in micro_batches]))
        grad_norm = float(self.engine.get_global_grad_norm())
        return self.loss_sum, StepResult(grad_norm, self.engine.was_step_applied())

    @contextlib.contextmanager
    def _timing_blocks(self, timer: PhaseTimer) -> Iterator[None]:
        """Count the blocks' forward passes, which wait for nobody, as the phase `forward`."""
        passing = contextlib.ExitStack()

        def enter(*_: Any) -> None:
            passing.enter_context(timer.phase("forward"))

        def leave(*_: Any) -> None:
            passing.close()

        with contextlib.ExitStack() as hooks:
            for block in self.blocks().values():
                hooks.callback(block.register_forward_pre_hook(enter).remove)
                hooks.callback(block.register_forward_hook(leave).remove)
            yield

    def _flow(self, micro_batches: list[tuple[Tensor, Tensor, Tensor]]) -> Iterator[tuple[Carried, None]]:
        """What the first stage takes in; the targets wait for their micro-batch to arrive in the last one."""
        self.engine.reset_activation_shape()  # else the stages expect micro-batches as large as those before
        self.targets = iter([targets for _, targets, _ in micro_batches])
        return iter([(self._inputs(tokens, cu_seqlens), None) for tokens, _, cu_seqlens in micro_batches])

    def _inputs(self, tokens: Tensor, cu_seqlens: Tensor) -> Carried:
        if not self.config.data.reset_state_at_documents:
            return tokens
        # Of one length in all micro-batches, as the stages' buffers are: filled up with empty documents at the end.
        length = tokens.numel()
        return tokens, F.pad(cu_seqlens, (0, length + 1 - len(cu_seqlens)), value=length)

    def _score(self, embedding: nn.Module, hidden: Tensor) -> Tensor:
        """The losses of the next micro-batch. They are the stage's output, since DeepSpeed drops bf16 gradients that
        arise outside of it."""
        targets = self._sent(next(self.targets))
        return embedding(self.seams.enter(hidden), targets, self.config.train.loss_chunk_tokens)

    def _loss(self, losses: Tensor, _: None) -> Tensor:
        if not losses.requires_grad:
            self.token_losses = losses
            return losses.sum()
        loss = losses.sum()
        self.loss_sum += loss.detach()
        self._count_sources(losses, next(self.sources))
        return loss * self.loss_factor
