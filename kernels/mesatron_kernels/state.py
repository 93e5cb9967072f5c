"""The values that go in and out of the Mesa operator."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MesaState(NamedTuple):
    """Recurrent state of N sequences with h heads: all that later tokens need to know of earlier ones.

    H: float32 or float64 [N, h, D, D], the decayed sum of beta k k^T (symmetric, positive semidefinite).
    G: float32 or float64 [N, h, Dv, D], the decayed sum of beta v k^T.
    """

    H: Tensor
    G: Tensor


class MesaOutput(NamedTuple):
    """Result of the operator.

    o: [B, T, h, Dv] in v's dtype; [B, h, Dv] from a single step.
    state: the state after the last token of every sequence, or None if it was not asked for.
    steps: int32 [B, T, h] (a single step: [B, h]), solver steps taken by each token; 0 from an exact solver.
    residual: float32 or float64, same shape, norm of the solver's residual divided by the norm of q.
    """

    o: Tensor
    state: MesaState | None
    steps: Tensor
    residual: Tensor
