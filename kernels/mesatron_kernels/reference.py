"""The Mesa operator as the paper defines it: a loop over tokens, an exact dense solve for each, all in float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mesatron_kernels.state import MesaOutput, MesaState


def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor,
    beta: Tensor,
    lam: Tensor,
    *,
    initial_state: MesaState | None,
    cu_seqlens: Tensor | None,
    max_steps: int,
    tolerance: float,
    chunk_size: int,
    return_state: bool,
) -> MesaOutput:
    """Exact form of `mesatron_kernels.mesa`, where the arguments are described; the solver's settings play no part.

    Slow. Steps and residual are reported as 0. Gradients by automatic differentiation.
    """
    batch, length, heads, key_size = q.shape
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    count = batch if cu_seqlens is None else len(bounds) - 1
    if initial_state is None:
        H = q.new_zeros(count, heads, key_size, key_size, dtype=torch.float64)
        G = q.new_zeros(count, heads, v.shape[-1], key_size, dtype=torch.float64)
    else:
        H, G = initial_state.H.double(), initial_state.G.double()

    outputs, states = [], []
    for document, (begin, end) in enumerate(pairwise(bounds)):
        rows = slice(None) if cu_seqlens is None else slice(document, document + 1)
        state = MesaState(H[rows], G[rows])
        for t in range(begin, end):
            o, state = _step(q[:, t], k[:, t], v[:, t], log_gamma[:, t], beta[:, t], lam, state)
            outputs.append(o)
        states.append(state)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    final = MesaState(*(torch.cat(parts).to(dtype) for parts in zip(*states, strict=True))) if return_state else None
    zeros = q.new_zeros(batch, length, heads, dtype=dtype)
    return MesaOutput(torch.stack(outputs, 1).to(v.dtype), final, zeros.int(), zeros)


def mesa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor,
    beta: Tensor,
    lam: Tensor,
    state: MesaState,
    *,
    max_steps: int,
    tolerance: float,
) -> MesaOutput:
    """One token of `mesatron_kernels.mesa_step`, solved exactly."""
    o, new_state = _step(q, k, v, log_gamma, beta, lam, state)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    zeros = q.new_zeros(q.shape[:2], dtype=dtype)
    return MesaOutput(o.to(v.dtype), MesaState(*(s.to(dtype) for s in new_state)), zeros.int(), zeros)


def _step(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, lam: Tensor, state: MesaState
) -> tuple[Tensor, MesaState]:
    """Shapes as in `mesatron_kernels.mesa_step`; o [B, h, Dv] and the next state in float64."""
    q, k, v, log_gamma, beta, lam = (x.double() for x in (q, k, v, log_gamma, beta, lam))
    gamma, beta_k = log_gamma.exp()[..., None, None], beta[..., None] * k
    H = gamma * state.H.double() + k.unsqueeze(-1) * beta_k.unsqueeze(-2)
    G = gamma * state.G.double() + v.unsqueeze(-1) * beta_k.unsqueeze(-2)
    q_star = torch.linalg.solve(H + torch.diag_embed(lam), q)
    return torch.einsum("bhij,bhj->bhi", G, q_star), MesaState(H, G)
