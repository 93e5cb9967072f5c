"""Products of forget gates as exponentials of sums of their logarithms, taken in float64: an exponent may be the small
difference of two large sums."""

from __future__ import annotations

import torch
from mesatron_kernels.chunkwise import FORGETS_ALL
from torch import Tensor
from torch.nn import functional as F

from mesatron.model.fused import takes_triton
from mesatron.model.precision import at_least_fp32


def log_decays(log_gamma: Tensor) -> Tensor:
    """[..., L] to [..., L, L + 1]: entry (t, 0) is the log decay from before the first token to t, (t, s + 1) that from
    token s to t: the sum over s+1 .. t, -inf across a token that forgets all and for s > t.
    """
    forgets = log_gamma < FORGETS_ALL
    total = F.pad(log_gamma.masked_fill(forgets, 0.0).double(), (1, 0)).cumsum(-1)
    segment = F.pad(forgets, (1, 0)).cumsum(-1, dtype=torch.int32)
    exponent = (total[..., 1:, None] - total[..., None, :]).to(log_gamma.dtype)
    linked = (segment[..., 1:, None] == segment[..., None, :]).tril(1)
    return exponent.masked_fill(~linked, float("-inf"))


def log_decay_after(log_gamma: Tensor, dimension: int) -> Tensor:
    """The sum of all later entries along `dimension`, in float64."""
    entries = log_gamma.double().movedim(dimension, -1)  # last: a GPU adds up along another one token after the other
    return F.pad(entries[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1).movedim(-1, dimension)


def run_decays(log_gamma: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    """Log decays of a run of log_gamma [B, T, h]: after each token [B, T, h] and over all of it [B, h].

    Added up in float64, from which Triton's form rounds to fp32. implementation: that of a recurrence.
    """
    form = "auto" if implementation == "fla" else implementation
    if log_gamma.dtype == torch.float32 and takes_triton(form, log_gamma):
        from mesatron.model.recurrences.decay_kernels import RunDecays

        return RunDecays.apply(log_gamma)
    return log_decay_after(log_gamma, 1), log_gamma.double().sum(1)


def weighted_sum(terms: Tensor, log_weights: Tensor) -> Tensor:
    """Sum over the first dimension of exp(log_weights) [n, ...] times terms [n, ..., any more]."""
    weights = log_weights.exp().to(terms.dtype)
    return (terms * weights.view(*weights.shape, *[1] * (terms.ndim - weights.ndim))).sum(0)


def weighted_products(v: Tensor, k: Tensor, weights: Tensor, implementation: str, squares: bool = False) -> Tensor:
    """Sum over tokens of weights [B, T, h] times v k^T, for v [B, T, h, Dv] and k [B, T, h, D], to [B, h, Dv, D]; in
    fp32 or float64, under autocast too. With `squares` the same sum of k k^T comes first: [B, h, D + Dv, D].

    implementation: that of a recurrence. The Triton form is for bf16, and beside fla-core's recurrences too.
    """
    form = "auto" if implementation == "fla" else implementation
    if v.dtype == k.dtype == torch.bfloat16 and takes_triton(form, k):
        from mesatron.model.recurrences.decay_kernels import WeightedProducts

        return WeightedProducts.apply(v, k, weights.float(), squares)
    with torch.autocast(k.device.type, enabled=False):
        k, v = at_least_fp32(k), at_least_fp32(v)
        return torch.einsum(
            "bthi,bthj->bhij", torch.cat([k, v], -1) if squares else v, k * weights.to(k.dtype).unsqueeze(-1)
        )
