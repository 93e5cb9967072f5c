"""Context parallelism for recurrent mixers: every process holds a run of tokens of each sequence.

What a process has to know of all tokens before its run is one state. The state after a run is decay * state before +
summary, with decay the product of the run's forget gates and summary the state after it from an empty start. So each
process summarises its run, all exchange summaries, and each combines those to its left (paper section 2: the
recurrences are linear in the state). What is sent does not grow with the number of tokens, in the backward pass
neither: there each process gets the gradient of its summary from all those to its right. The convolution borrows the
last tokens of the run to the left.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mesatron_kernels import MesaOutput, MesaState, mesa
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mesatron.config import Config
from mesatron.model.convolution import ShortConvolution
from mesatron.model.precision import at_least_fp32
from mesatron.parallel.layout import Group
from mesatron.parallel.megatron import gather_from_sequence_parallel_region


class ContextParallel:
    """How a mixer of one process of a context group looks at the tokens of the others.

    Tensors come as [B, T, ...], or as [1, B T, ...] together with cu_seqlens, the starts of documents in these runs; T
    is the length of a run. A run whose first token is no start continues the run to its left.
    """

    def __init__(self, config: Config, group: Group) -> None:
        self.group = group
        self.run_length = config.data.context_length // group.size

    def convolve(self, convolution: ShortConvolution, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """`convolution` of x [B, T, C], with what lies to the left of its runs before them: heads [B, T, h, D]."""
        runs = self._runs(x)
        borrowed = convolution.width - 1
        if not borrowed:
            return convolution(x)
        tail = runs[:, self.run_length - borrowed :]
        bounds = None
        if cu_seqlens is not None:
            # What comes before the last start is no concern of those to the right.
            starts = self._starts(cu_seqlens, runs.shape[0])
            started_later = starts.flip(1).cumsum(1).flip(1) - starts.int()
            tail = tail * (started_later[:, -borrowed:] == 0)[..., None]
            lead = starts.new_zeros(runs.shape[0], borrowed)
            lead[:, 0] = True
            opened = torch.cat([lead, starts], 1)
            bounds = torch.cat([opened.flatten().nonzero().squeeze(1), cu_seqlens.new_tensor([opened.numel()])])
        extended = torch.cat([_FromLeft.apply(tail, self.group), runs], 1)
        y, after = convolution(extended if bounds is None else extended.view(1, -1, x.shape[-1]), None, bounds)
        y = y.reshape(*extended.shape[:2], *y.shape[2:])[:, borrowed:]
        return y.reshape(*x.shape[:2], *y.shape[2:]), after

    def mesa(
        self, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, lam: Tensor,
        *, cu_seqlens: Tensor | None, **how: Any,
    ) -> MesaOutput:  # fmt: skip
        """`mesatron_kernels.mesa` of these runs, given the state that the runs to the left lead to."""
        shape = q.shape[:2]
        q, k, v, log_gamma, beta = map(self._runs, (q, k, v, log_gamma, beta))
        if cu_seqlens is not None:
            log_gamma = log_gamma.masked_fill(self._starts(cu_seqlens, len(q))[..., None], float("-inf"))
        summary, log_decay = checkpoint(summarize, k, v, log_gamma, beta, use_reentrant=False)
        before = self._combine(summary, log_decay)
        result = mesa(
            q, k, v, log_gamma, beta, lam, **how | {"initial_state": MesaState(*before.split(k.shape[-1], -2))}
        )  # fmt: skip
        o, steps, residual = (x.reshape(*shape, *x.shape[2:]) for x in (result.o, result.steps, result.residual))
        return MesaOutput(o, result.state, steps, residual)

    def _combine(self, summary: Tensor, log_decay: Tensor) -> Tensor:
        """The state before this process's runs [B, h, E, D] from every process's summary and log decay [B, h]."""
        own = torch.cat([summary.flatten(2), log_decay.unsqueeze(-1)], -1)
        gathered = gather_from_sequence_parallel_region(own.unsqueeze(0), group=self.group.handle)
        # Without a process to the left the sums are empty; the backward pass still meets the others in the exchange.
        return combine(gathered[: self.group.rank, ..., :-1], gathered[: self.group.rank, ..., -1]).view_as(summary)

    def _runs(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.run_length, *x.shape[2:])

    def _starts(self, cu_seqlens: Tensor, rows: int) -> Tensor:
        """bool [B, T]: tokens that begin a document."""
        starts = torch.zeros(rows * self.run_length + 1, dtype=torch.bool, device=cu_seqlens.device)
        return starts.index_fill(0, cu_seqlens.long(), True)[:-1].view(rows, self.run_length)


def summarize(k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """State [H; G] [B, h, D + Dv, D] after tokens [B, T, h, ...] from an empty start; log decay [B, h] over them."""
    with torch.autocast(k.device.type, enabled=False):
        k, v = at_least_fp32(k), at_least_fp32(v)
        weighted = k * (_decay_after(log_gamma, 1) * beta).to(k.dtype).unsqueeze(-1)
        H = torch.einsum("bthi,bthj->bhij", k, weighted)
        G = torch.einsum("bthi,bthj->bhij", v, weighted)
        return torch.cat([H, G], -2), log_gamma.double().sum(1).to(k.dtype)


def combine(summaries: Tensor, log_decays: Tensor) -> Tensor:
    """State [...] after runs in a row, from the summary [n, B, h, ...] and log decay [n, B, h] of each."""
    weight = _decay_after(log_decays, 0).to(summaries.dtype)
    return (summaries * weight.view(*weight.shape, *[1] * (summaries.ndim - weight.ndim))).sum(0)


def _decay_after(log_decay: Tensor, dimension: int) -> Tensor:
    """exp of the sum of all later entries along `dimension`, in float64: an exponent may be the sum of thousands."""
    entries = log_decay.double().movedim(dimension, 0)
    later = torch.cat([entries[1:], torch.zeros_like(entries[:1])])
    return later.flip(0).cumsum(0).flip(0).exp().movedim(0, dimension)


class _FromLeft(torch.autograd.Function):
    """x of the process to the left, zeros in the first one; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _shift(x, group, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _shift(gradient, ctx.group, -1), None


def _shift(x: Tensor, group: Group, step: int) -> Tensor:
    """Send x to the process `step` further on and return what comes from the other side; zeros where nobody sends."""
    received = torch.zeros_like(x, memory_format=torch.contiguous_format)
    transfers = []
    if 0 <= group.rank + step < group.size:
        peer = dist.get_global_rank(group.handle, group.rank + step)
        transfers.append(dist.P2POp(dist.isend, x.contiguous(), peer, group.handle))
    if 0 <= group.rank - step < group.size:
        peer = dist.get_global_rank(group.handle, group.rank - step)
        transfers.append(dist.P2POp(dist.irecv, received, peer, group.handle))
    for transfer in dist.batch_isend_irecv(transfers):
        transfer.wait()
    return received
