"""The memory-bound functions around a mixer, in plain torch and, on a GPU, as Triton kernels that read and write each
tensor once. The torch form defines what is meant; on an H200 its passes over memory would cost more than the mixer.

`implementation` is "torch", "triton" or "auto", see `form`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mesatron.model.precision import at_least_fp32

IGNORED = -100
"""torch's index of a target that counts for nothing."""

_TRITON_IS_INSTALLED = find_spec("triton") is not None


def form(implementation: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """What an implementation stands for: "auto" is triton on a GPU that has it, except for float64, else torch."""
    if implementation == "auto":
        return "triton" if device.type == "cuda" and _TRITON_IS_INSTALLED and dtype != torch.float64 else "torch"
    return implementation


def takes_triton(implementation: str, x: Tensor) -> bool:
    """Whether the Triton form serves x."""
    return form(implementation, x.device, x.dtype) == "triton"


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, implementation: str) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, in fp32; x [..., *weight.shape], result alike.

    weight is [channels], or [heads, head_dim] to norm every head by itself.
    """
    if takes_triton(implementation, x):
        from mesatron.model import fused_kernels

        flat = x.reshape(-1, weight.numel()).contiguous()
        return fused_kernels.RMSNorm.apply(flat, weight.view(-1, weight.shape[-1]), epsilon).view(x.shape)
    normed = F.rms_norm(at_least_fp32(x), x.shape[-1:], eps=epsilon)
    return (normed * weight).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor, implementation: str) -> Tensor:
    """silu(gate) * up of two tensors of one shape."""
    if takes_triton(implementation, gate):
        from mesatron.model import fused_kernels

        return fused_kernels.SwiGLU.apply(gate.contiguous(), up.contiguous())
    return F.silu(gate) * up


def unit_heads(
    x: Tensor, weight: Tensor, position: Tensor | None, history: Tensor | None, head_dim: int, implementation: str
) -> Tensor:
    """Every head of silu(`convolve`(x)) brought to Euclidean norm 1: x [B, T, C] to [B, T, C / head_dim, head_dim].

    weight [C, width]; position and history as for `convolve`. Both at once take torch.
    """
    if takes_triton(implementation, x) and (history is None or position is None):
        from mesatron.model import fused_kernels

        places = None if position is None else position.int()
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        before = history.contiguous() if history is not None and history.shape[1] else None
        y = fused_kernels.UnitHeads.apply(flat, weight.contiguous(), places, before, x.shape[1], head_dim)
        return y.view(*x.shape[:2], -1, head_dim)
    y = F.silu(convolve(x, weight, position, history)).unflatten(-1, (-1, head_dim))
    return F.normalize(at_least_fp32(y), dim=-1).to(x.dtype)


def convolve(x: Tensor, weight: Tensor, position: Tensor | None = None, history: Tensor | None = None) -> Tensor:
    """Causal depthwise convolution y_t = sum_j w_j x_(t-j), j = 0 .. width-1, of x [B, T, C] with weight [C, width].

    `history` [B, width-1, C] precedes x (zeros if None). With `position` [T], each token's place in its document, no
    document sees the one before it; B is 1 then.
    """
    width, length = weight.shape[1], x.shape[1]
    if history is None:
        history = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    padded = torch.cat([history, x], dim=1)
    y = x * weight[:, 0]
    for lag in range(1, width):
        lagged = padded[:, width - 1 - lag : width - 1 - lag + length]
        if position is not None:
            lagged = lagged * (position >= lag)[:, None]
        y = y + lagged * weight[:, lag]
    return y


def linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, cap: float, chunk_tokens: int, implementation: str
) -> Tensor:
    """fp32 cross entropy [N] of the `capped` logits hidden [N, width] weight [vocabulary, width]^T; targets int64 [N],
    0 where the target is -100, torch's ignored index.

    Logits of only `chunk_tokens` tokens are in memory at a time: the backward pass forms them anew.
    """
    if takes_triton(implementation, hidden):
        return losses(linear_scores(hidden, weight, targets, len(weight), cap, chunk_tokens, implementation), targets)

    def cross_entropy(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(capped(F.linear(hidden, weight), cap), targets, reduction="none")

    return _in_chunks(cross_entropy, hidden, targets, chunk_tokens)


def linear_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, words: int, cap: float, chunk_tokens: int, implementation: str
) -> Tensor:
    """What `losses` are made of, fp32 [2, N], for a part of a vocabulary: the first `words` rows of weight [.., width].

    Of every token the log of the sum of exponentials of its logits, -inf if there are no words, and its target's logit,
    -inf where the target, counted from the part's first word, is not in it. A whole's scores are the parts' logsumexp.
    The rest is as for `linear_loss`.
    """
    if takes_triton(implementation, hidden):
        from mesatron.model import loss_kernels

        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        hidden, targets = hidden.contiguous(), targets.contiguous()
        return loss_kernels.LinearScores.apply(hidden, weight, targets, words, cap, chunk_tokens)

    beyond = torch.arange(len(weight), device=weight.device) >= words

    def scores(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = capped(F.linear(hidden, weight), cap).masked_fill(beyond, -torch.inf)
        elsewhere = (targets < 0) | (targets >= words)
        chosen = logits.gather(1, targets.masked_fill(elsewhere, 0)[:, None]).squeeze(1)
        return torch.stack([logits.logsumexp(1), chosen.masked_fill(elsewhere, -torch.inf)])

    return _in_chunks(scores, hidden, targets, chunk_tokens)


def losses(scores: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy [N] of a whole vocabulary's scores [2, N], see `linear_scores`; 0 where the target is -100, NaN
    where there is no such word."""
    normalizers, chosen = scores
    known = torch.where(chosen.isneginf(), torch.nan, normalizers - chosen)
    return known.masked_fill(targets == IGNORED, 0.0)


def _in_chunks(
    function: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, targets: Tensor, chunk_tokens: int
) -> Tensor:
    """`function` of `chunk_tokens` tokens at a time, made again in the backward pass; tokens are its last dimension."""
    chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    return torch.cat([checkpoint(function, h, t, use_reentrant=False) for h, t in chunks], -1)


def capped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap) in fp32."""
    return cap * torch.tanh(at_least_fp32(logits) / cap)
