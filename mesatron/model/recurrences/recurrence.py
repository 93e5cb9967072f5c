"""What every recurrence offers: a form for sequences, one token, and what processes that share a sequence exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mesatron.model.precision import at_least_fp32
from mesatron.model.recurrences.chunks import Chunks


class Output(NamedTuple):
    """o [B, T, ...] in the values' dtype; state after every sequence, or None if not asked for; figures by name
    [B, T, h], without gradient."""

    o: Tensor
    state: Any
    figures: dict[str, Tensor]


class Recurrence(ABC):
    """A state that each token decays and adds to.

    Inputs are a NamedTuple of tensors [B, T, ...] with a field `log_gamma` (at most 0; -inf forgets all before the
    token; None stands for 0). States are a NamedTuple of tensors [N, ...] in fp32 or float64.
    """

    remakes_summary: ClassVar[bool] = True
    """Whether `summarize` is better run again in the backward pass than all that it computes kept."""
    marks_starts: ClassVar[bool] = False
    """Whether a sequence's first token is told by its gate, which then has to forget all."""

    @abstractmethod
    def __call__(
        self, inputs: Any, initial_state: Any = None, cu_seqlens: Tensor | None = None, return_state: bool = False
    ) -> Output:
        """The outputs of all tokens.

        initial_state: of N sequences, empty if None; N is B, or the number of packed documents. cu_seqlens int32 or
        int64 [N + 1]: bounds of documents packed into one row (B = 1), rising from 0 to T; a document may be empty.
        Gradients flow to all inputs and the initial state, from o and the final state.
        """

    @abstractmethod
    def summarize(self, inputs: Any) -> tuple[Tensor, ...]:
        """What a run of tokens does to any state before it: tensors [B, ...] such as its decay and its own state."""

    @abstractmethod
    def combine(self, summaries: Sequence[Tensor]) -> Any:
        """The state of B sequences after n runs in a row, from the tensors of `summarize` stacked: [n, B, ...]."""

    def reset(self, inputs: Any, starts: Tensor) -> Any:
        """`inputs` whose tokens at `starts`, bool [B, T], forget all before them."""
        log_gamma = inputs.log_gamma
        if log_gamma is None:
            log_gamma = at_least_fp32(inputs[0]).new_zeros(inputs[0].shape[:3])
        return inputs._replace(log_gamma=log_gamma.masked_fill(starts[..., None], float("-inf")))


@dataclass(frozen=True)
class ChunkwiseRecurrence(Recurrence):
    """A recurrence that is defined by `step` and computed by `chunkwise`, or by `fla` on a GPU.

    implementation: reference or fla, else torch. chunk_size: tokens treated together, a matter of speed and rounding.
    """

    implementation: str = "torch"
    chunk_size: int = 64

    @abstractmethod
    def empty_state(self, inputs: Any, sequences: int) -> Any:
        """The state before the first token of so many sequences."""

    @abstractmethod
    def step(self, inputs: Any, state: Any) -> tuple[Tensor, Any]:
        """One token: inputs [B, ...], without the dimension of tokens, and the state before it to o [B, ...] and the
        state after it."""

    @abstractmethod
    def chunkwise(self, inputs: Any, initial: Any, chunks: Chunks) -> tuple[Tensor, Any]:
        """All tokens, by matrix products over chunks: o [B, T, ...] and the states after all sequences."""

    def fla(self, inputs: Any, initial: Any, cu_seqlens: Tensor | None, return_state: bool) -> tuple[Tensor, Any]:
        """All tokens, by fla-core."""
        raise NotImplementedError

    def __call__(
        self, inputs: Any, initial_state: Any = None, cu_seqlens: Tensor | None = None, return_state: bool = False
    ) -> Output:
        batch, length = inputs[0].shape[:2]
        if initial_state is not None and length == 1 and return_state and cu_seqlens is None:
            return self._one_token(inputs, initial_state)
        if initial_state is None and self.marks_starts:
            inputs = self.reset(inputs, starts_of(cu_seqlens, batch, length, inputs[0].device))
        with torch.autocast(inputs[0].device.type, enabled=False):
            if self.implementation == "fla":
                o, state = self.fla(inputs, initial_state, cu_seqlens, return_state)
            elif self.implementation == "reference":
                o, state = self._token_by_token(inputs, initial_state, cu_seqlens)
            else:
                o, state = self._by_chunks(inputs, initial_state, cu_seqlens, return_state)
        return Output(o.to(_values(inputs).dtype), state if return_state else None, {})

    def _one_token(self, inputs: Any, state: Any) -> Output:
        with torch.autocast(inputs[0].device.type, enabled=False):
            tokens = type(inputs)(*(x if x is None else at_least_fp32(x[:, 0]) for x in inputs))
            o, state = self.step(tokens, state)
        return Output(o[:, None].to(_values(inputs).dtype), state, {})

    def _by_chunks(
        self, inputs: Any, initial: Any, cu_seqlens: Tensor | None, return_state: bool
    ) -> tuple[Tensor, Any]:
        batch, length = inputs[0].shape[:2]
        if cu_seqlens is not None and initial is None and not return_state:
            # Nobody asks for states, so documents may share chunks.
            inputs, cu_seqlens = self.reset(inputs, starts_of(cu_seqlens, batch, length, inputs[0].device)), None
        inputs = type(inputs)(*(x if x is None else at_least_fp32(x) for x in inputs))
        if initial is None:
            initial = self.empty_state(inputs, batch if cu_seqlens is None else len(cu_seqlens) - 1)
        return self.chunkwise(inputs, initial, Chunks.of(batch, length, self.chunk_size, cu_seqlens))

    def _token_by_token(self, inputs: Any, initial: Any, cu_seqlens: Tensor | None) -> tuple[Tensor, Any]:
        batch, length = inputs[0].shape[:2]
        dtype = at_least_fp32(inputs[0]).dtype
        inputs = type(inputs)(*(x if x is None else x.double() for x in inputs))
        bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
        if initial is None:
            initial = self.empty_state(inputs, batch * (len(bounds) - 1))
        outputs, states = [], []
        for number, (begin, end) in enumerate(pairwise(bounds)):
            state = type(initial)(*(x.double().split(batch)[number] for x in initial))
            for t in range(begin, end):
                o, state = self.step(type(inputs)(*(x if x is None else x[:, t] for x in inputs)), state)
                outputs.append(o)
            states.append(state)
        final = type(initial)(*(torch.cat(parts).to(dtype) for parts in zip(*states, strict=True)))
        return torch.stack(outputs, 1), final


def starts_of(cu_seqlens: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """bool [B, T]: the first tokens of sequences; with cu_seqlens [N + 1], the starts of documents in all rows laid end
    to end, in which the last ones may be empty."""
    starts = torch.zeros(batch * length + 1, dtype=torch.bool, device=device)
    if cu_seqlens is None:
        starts[:-1:length] = True
    else:
        starts.index_fill_(0, cu_seqlens.long(), True)
    return starts[:-1].view(batch, length)


def _values(inputs: Any) -> Tensor:
    return inputs.v if hasattr(inputs, "v") else inputs.x
