"""CUDA graphs of blocks: all kernels of a block's forward or backward pass are launched at once.

A block launches hundreds of kernels there and back, for which Python takes several milliseconds; with few tokens in a
micro-batch the GPU waits for it. A graph repeats what was recorded with the same memory, so that everything a block
reads and writes stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from mesatron.model.backbone import Block

WARM_UP_PASSES = 3
"""In which kernels are compiled and tuned and connections made, none of which can be recorded."""


class CannotRecordError(RuntimeError):
    """A pass waits for the host, or does something else that a graph cannot hold."""


class Passes(nn.Module):
    """One block's two passes as graphs, with their tensors: x and y [B, T, width], dy, and gradients of x and of the
    block's parameters."""

    def __init__(self, block: Block, x: Tensor) -> None:
        super().__init__()
        self.block, self.x = block, x.detach().requires_grad_()
        self.leaves = tuple(block.parameters())
        # With the parameters' memory, but not the nodes where DeepSpeed waits for gradients, on another stream.
        self.weights = {name: p.detach().requires_grad_() for name, p in self.named_parameters()}
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.y = self.dy = x
        self.gradients: tuple[Tensor | None, ...] = ()
        self.observations: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """The block, whatever a pipeline has made of it."""
        return Block.forward(self.block, x)[0]

    def compute(self) -> Tensor:
        """The forward pass itself."""
        return functional_call(self, self.weights, (self.x,))

    def differentiate(self, y: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The backward pass itself."""
        return torch.autograd.grad(y, (self.x, *self.weights.values()), dy, allow_unused=True)


class BlockGraphs:
    """Graphs of blocks in a row, whose inputs are all like x [B, T, width] and belong to no documents.

    in_flight: micro-batches that have passed forward and not yet backward, at most; each has memory of its own. Raises
    CannotRecordError where a block does what a graph cannot hold.
    """

    def __init__(self, blocks: Sequence[Block], x: Tensor, in_flight: int) -> None:
        self.shape = x.shape
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for block in blocks:
                one = Passes(block, x)
                for _ in range(WARM_UP_PASSES):
                    one.differentiate(one.compute(), x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        unused = _unused_bytes()
        try:
            rows = [_record(blocks, x) for _ in range(in_flight)]
        except RuntimeError as error:
            raise _first(error) from None
        self.bytes = _unused_bytes() - unused
        """Memory of activations, which no tensor seems to take."""
        self._passes = [passes for row in rows for passes in row]
        self._turns: dict[Block, Iterator[Passes]] = {
            block: cycle(passes) for block, passes in zip(blocks, zip(*rows, strict=True), strict=True)
        }

    def release(self) -> None:
        """Give the graphs up, for which NCCL would wait before it ends if they hold work of its."""
        torch.cuda.synchronize()
        for passes in self._passes:
            passes.forward_graph.reset()
            passes.backward_graph.reset()

    def take(self, x: Tensor, cu_seqlens: Tensor | None) -> bool:
        """Whether the blocks' pass over x is one that was recorded."""
        return torch.is_grad_enabled() and cu_seqlens is None and x.shape == self.shape

    def run(self, block: Block, x: Tensor) -> Tensor:
        """`block` of x [B, T, width]."""
        passes = next(self._turns[block])
        if passes.observations:  # evaluation has put others in their place
            block.mixer.observations = passes.observations  # type: ignore[assignment]
        return _Replay.apply(passes, x, *passes.leaves)


class _Replay(torch.autograd.Function):
    """A block's passes as they were recorded, of which autograd sees one node."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, x: Tensor, *_: Tensor) -> Tensor:
        ctx.passes = passes
        if x.data_ptr() != passes.x.data_ptr():
            passes.x.copy_(x)
        passes.forward_graph.replay()
        return passes.y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        passes = ctx.passes
        if dy.data_ptr() != passes.dy.data_ptr():
            passes.dy.copy_(dy)
        passes.backward_graph.replay()
        dx, *gradients = passes.gradients
        # DeepSpeed keeps parameters' gradients while the next forward pass makes use of this memory.
        return None, dx.detach(), *(x if x is None else x.clone() for x in gradients)


def _record(blocks: Sequence[Block], x: Tensor) -> list[Passes]:
    """Passes of all blocks, which share memory: recorded in the order in which they will run."""
    pool, row, x = torch.cuda.graph_pool_handle(), [], torch.empty_like(x)
    for block in blocks:
        # The input is where the block before has put its output, and below with gradients alike: nothing is copied.
        one = Passes(block, x)
        # Other threads, such as NCCL's and those that save, go on meanwhile.
        with torch.cuda.graph(one.forward_graph, pool=pool, capture_error_mode="thread_local"):
            one.y = x = one.compute()
        one.observations = getattr(block.mixer, "observations", {})
        row.append(one)
    dy: Tensor = torch.empty_like(x)
    for one in reversed(row):
        one.dy = dy
        with torch.cuda.graph(one.backward_graph, pool=pool, capture_error_mode="thread_local"):
            one.gradients = one.differentiate(one.y, dy)
        one.y = one.y.detach()
        dy = one.gradients[0]  # type: ignore[assignment]
    return row


def _first(error: BaseException) -> BaseException:
    """What failed first: to end a recording in which something has failed is an error too."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return CannotRecordError(str(error).splitlines()[0]) if "captur" in str(error) else error


def _unused_bytes() -> int:
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
