"""Context parallelism: every process holds a run of tokens of each sequence.

What a process has to know of all tokens before its run is one state. The recurrences are linear in it (paper section
2): the state after a run is transition * state before + summary, with transition the product of what the run's tokens
do to a state (a decay, or a matrix) and summary the state after it from an empty start. So each process summarises its
run, all exchange summaries, and each combines those to its left. What is sent does not grow with the number of tokens,
in the backward pass neither: there each process gets the gradient of its summary from all those to its right. The
convolutions borrow the last tokens of the run to the left. Softmax attention has no such state: keys and values are
gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mesatron_kernels.documents import documents_of, send_documents
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mesatron.config import Config
from mesatron.model.attention import Attention
from mesatron.model.convolution import ShortConvolution
from mesatron.model.recurrences import Output, Recurrence
from mesatron.model.recurrences.recurrence import starts_of
from mesatron.parallel.layout import Group


class ContextParallel:
    """How a mixer of one process of a context group looks at the tokens of the others.

    Tensors come as [B, T, ...], or as [1, B T, ...] together with cu_seqlens, the starts of documents in these runs; T
    is the length of a run. A run whose first token is no start continues the run to its left.
    """

    def __init__(self, config: Config, group: Group) -> None:
        self.group = group
        self.run_length = config.data.context_length // group.size

    def lend(self, inputs: Sequence[Tensor], tokens: int, cu_seqlens: Tensor | None) -> list[Lent | None]:
        """Begin to tell the process on the right the last tokens of the runs of inputs [B, T, C] of convolutions."""
        if not tokens:
            return [None] * len(inputs)
        runs, tails = map(list, zip(*(_WithTail.apply(self._runs(x), tokens) for x in inputs), strict=True))
        if cu_seqlens is not None:
            # What comes before the last start is no concern of those to the right.
            starts = self._starts(cu_seqlens, len(tails[0]))
            started_later = starts.flip(1).cumsum(1).flip(1) - starts.int()
            tails = [tail * (started_later[:, -tokens:] == 0)[..., None] for tail in tails]
        loan = Loan(tails, self.group)
        return [Lent(x, loan, number) for number, x in enumerate(runs)]

    def convolve(
        self, convolution: ShortConvolution, x: Tensor, cu_seqlens: Tensor | None, lent: Lent | None
    ) -> tuple[Tensor, Tensor]:
        """`convolution` of x [B, T, C], with what lies to the left of its runs before them: heads [B, T, h, D]."""
        if lent is None:
            return convolution(x)
        runs, before = lent.runs, lent.loan.tokens()[lent.number]
        if cu_seqlens is None:
            y, after = convolution(runs, before)
            return y.reshape(*x.shape[:2], *y.shape[2:]), after
        borrowed = before.shape[1]
        extended = torch.cat([before, runs], 1)
        y, after = convolution(extended.view(1, -1, x.shape[-1]), None, self._bounds(cu_seqlens, len(runs), borrowed))
        y = y.reshape(*extended.shape[:2], *y.shape[2:])[:, borrowed:]
        return y.reshape(*x.shape[:2], *y.shape[2:]), after

    def announce(self, recurrence: Recurrence, inputs: Any, cu_seqlens: Tensor | None) -> Announcement:
        """Begin the exchange of what the runs of all processes, here of the inputs [B, T, ...], do to a state."""
        runs = type(inputs)(*(x if x is None else self._runs(x) for x in inputs))
        if cu_seqlens is not None:
            runs = recurrence.reset(runs, self._starts(cu_seqlens, len(runs[0])))
        elif recurrence.marks_starts and self.group.rank == 0:
            runs = recurrence.reset(runs, starts_of(None, len(runs[0]), self.run_length, runs[0].device))
        if recurrence.remakes_summary:
            # No random numbers are drawn, so their generators need not be kept.
            summaries = checkpoint(recurrence.summarize, runs, use_reentrant=False, preserve_rng_state=False)
        else:
            summaries = recurrence.summarize(runs)
        return Announcement(runs, Exchange(summaries, self.group))

    def recur(self, recurrence: Recurrence, inputs: Any, announced: Announcement) -> Output:
        """`recurrence` of the announced inputs, given the state that the runs to the left lead to; q comes only now."""
        shape, runs = inputs[0].shape[:2], announced.runs
        if hasattr(inputs, "q"):
            runs = runs._replace(q=self._runs(inputs.q))
        # Without a process to the left there is nothing to combine; the backward pass still meets the others here.
        before = recurrence.combine([x[: self.group.rank] for x in announced.exchange.result()])
        result = recurrence(runs, before)
        figures = {name: x.reshape(*shape, *x.shape[2:]) for name, x in result.figures.items()}
        return Output(result.o.reshape(*shape, *result.o.shape[2:]), None, figures)

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """`attention` of the queries of these runs; keys and values [B, T, h, D] of all runs are gathered."""
        shape = q.shape
        q, k, v = map(self._runs, (q, k, v))
        (gathered,) = Exchange([torch.stack([k, v])], self.group).result()
        seen = slice(0, (self.group.rank + 1) * self.run_length)
        k, v = gathered.movedim(0, 2).flatten(2, 3)[:, :, seen]
        segments = None
        if cu_seqlens is not None:
            starts = self._starts(cu_seqlens, len(q))
            (gathered,) = Exchange([starts.int()], self.group).result()
            segments = gathered.movedim(0, 1).flatten(1, 2).cumsum(1)[:, seen]
        return attention(q, k, v, segments).reshape(shape)

    def _runs(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.run_length, *x.shape[2:])

    def _bounds(self, cu_seqlens: Tensor, rows: int, borrowed: int) -> Tensor:
        """Those of the documents in runs with so many borrowed tokens before them, which begin a document too."""

        def make(bounds: Tensor) -> Tensor:
            starts = F.pad(self._starts(bounds, rows), (borrowed, 0))
            starts[:, 0] = True
            bounds = F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=starts.numel())
            return send_documents(bounds, cu_seqlens.device)

        return documents_of(cu_seqlens).made(("with borrowed tokens", rows, borrowed), make)

    def _starts(self, cu_seqlens: Tensor, rows: int) -> Tensor:
        """bool [B, T]: tokens that begin a document."""
        return starts_of(cu_seqlens, rows, self.run_length, cu_seqlens.device)


class Announcement(NamedTuple):
    """The inputs as runs, documents told apart, and the exchange of what they do to a state."""

    runs: Any
    exchange: Exchange


class Loan:
    """The last tokens of this process's runs on their way to the process on the right, and those of the one on the left
    on their way here."""

    def __init__(self, tails: Sequence[Tensor], group: Group) -> None:
        # Gathered by all though one neighbour needs them: they are few, and one collective hides behind other work.
        self._exchange, self._rank = Exchange(tails, group), group.rank
        self._tokens: list[Tensor] | None = None

    def tokens(self) -> list[Tensor]:
        """Of every tail that of the process on the left; zeros in the first one, whose backward pass meets the others
        here all the same."""
        if self._tokens is None:
            left = slice(max(0, self._rank - 1), self._rank)
            self._tokens = [x[left].sum(0) for x in self._exchange.result()]
        return self._tokens


class Lent(NamedTuple):
    """One of the tensors of a loan, as runs, in whose place `convolve` takes them."""

    runs: Tensor
    loan: Loan
    number: int


class _WithTail(torch.autograd.Function):
    """runs [B, T, C] as they are, for a convolution, and so many of their last tokens.

    The tail's gradient is added in place to that of the runs, which a convolution makes for nobody else; autograd would
    add a tensor of zeros with the tail at its end.
    """

    @staticmethod
    def forward(ctx: Any, runs: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        ctx.tokens = tokens
        return runs.view_as(runs), runs[:, -tokens:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, druns: Tensor, dtail: Tensor) -> tuple[Tensor, None]:
        druns[:, -ctx.tokens :] += dtail
        return druns, None


class Exchange:
    """Each of the tensors as all processes of a group have it, in one collective that goes on from here to `result`.

    In the backward pass, where gradients are summed over the processes, from there to here.
    """

    def __init__(self, own: Sequence[Tensor], group: Group) -> None:
        self.group = group
        self._shapes = [x.shape for x in own]
        self._work: dist.Work | None = None
        self._gradient: Tensor | None = None
        self._gathered: Tensor | None = _Begin.apply(torch.cat([x.flatten() for x in own])[None], self)

    def result(self) -> list[Tensor]:
        """The tensors [n, ...], in the order in which they were given. Called once."""
        gathered, self._gathered = self._gathered, None  # whose graph holds this exchange
        parts = _End.apply(gathered, self).split([shape.numel() for shape in self._shapes], 1)
        return [x.view(-1, *shape) for x, shape in zip(parts, self._shapes, strict=True)]

    def gather(self, own: Tensor) -> Tensor:
        """Begin to gather own [1, size] as [n, size]."""
        gathered = own.new_empty(self.group.size, own.shape[1])
        self._work = dist.all_gather_into_tensor(gathered, own, group=self.group.handle, async_op=True)
        return gathered

    def sum(self, gradients: Tensor) -> None:
        """Begin to sum this process's row of everyone's gradients [n, size]."""
        self._gradient = gradients.new_empty(1, gradients.shape[1])
        self._work = dist.reduce_scatter_tensor(
            self._gradient, gradients.contiguous(), group=self.group.handle, async_op=True
        )

    def wait(self) -> Tensor | None:
        """Wait for what was begun; the sum, if it was one."""
        assert self._work is not None
        self._work.wait()
        return self._gradient


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather(own)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.exchange.wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathered: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.exchange.sum(gradients)
        return gradients, None  # on its way to _Begin, whose gradient is the sum
