"""The Mesa operator: one signature, several named implementations."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mesatron_kernels import chunkwise, reference
from mesatron_kernels.state import MesaOutput, MesaState


class SequenceForm(Protocol):
    def __call__(
        self,
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
    ) -> MesaOutput: ...


class StepForm(Protocol):
    def __call__(
        self,
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
    ) -> MesaOutput: ...


class Implementation(NamedTuple):
    """The two forms of the operator; arguments as in `mesa` and `mesa_step`, all given."""

    mesa: SequenceForm
    mesa_step: StepForm


_implementations: dict[str, Implementation] = {}


def register(name: str, implementation: Implementation) -> None:
    """Make an implementation known by name."""
    _implementations[name] = implementation


def available() -> tuple[str, ...]:
    """Names of the known implementations."""
    return tuple(_implementations)


def resolve(name: str, device: torch.device | str) -> str:
    """The implementation that `name` stands for on a device; only "auto" stands for another one.

    "auto" is torch everywhere: triton is chosen by name until its gradients are checked at start on the GPU at hand.
    Raises ValueError for an unknown name.
    """
    if name == "auto":
        return "torch"
    if name not in _implementations:
        known = ", ".join(["auto", *_implementations])
        raise ValueError(f"Mesa implementation {name!r} is unknown; choose one of {known}.")
    return name


def _triton_mesa(*args, **kwargs) -> MesaOutput:
    # Imported at first use: a machine without a GPU needs no triton, whose interpreter is chosen while it is imported.
    from mesatron_kernels import triton_chunkwise

    return triton_chunkwise.mesa(*args, **kwargs)


register("reference", Implementation(reference.mesa, reference.mesa_step))
register("torch", Implementation(chunkwise.mesa, chunkwise.mesa_step))
# One token is one dense solve: torch's products fill the GPU as well.
register("triton", Implementation(_triton_mesa, chunkwise.mesa_step))


def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor,
    beta: Tensor,
    lam: Tensor,
    *,
    initial_state: MesaState | None = None,
    cu_seqlens: Tensor | None = None,
    max_steps: int = 30,
    tolerance: float = 1e-4,
    chunk_size: int = 64,
    return_state: bool = True,
    implementation: str = "auto",
) -> MesaOutput:
    """The Mesa layer's sequence mixing (arXiv 2506.05233, section 2): per head and token t,

        H_t = gamma_t H_(t-1) + beta_t k_t k_t^T
        G_t = gamma_t G_(t-1) + beta_t v_t k_t^T
        o_t = G_t (H_t + Lambda)^-1 q_t

    Args:
        q, k: [B, T, h, D], used as given: no normalisation and no scale. T >= 1.
        v: [B, T, h, Dv].
        log_gamma: float32 or float64 [B, T, h], at most 0; -inf forgets everything before the token.
        beta: float32 or float64 [B, T, h], at least 0.
        lam: [h, D], the diagonal of Lambda, above 0.
        initial_state: states before the first token of each of N sequences (H symmetric), zero if not given. N is B, or
            the number of documents.
        cu_seqlens: int32 or int64 [N + 1], bounds of documents packed into one row (B = 1), from 0 to T; a document may
            be empty.
        max_steps: conjugate gradient steps at most, in the forward and in the backward solve.
        tolerance: a token's solve stops when its residual norm is at most this times the norm of its right-hand side;
            0 gives max_steps steps.
        chunk_size: tokens treated together; a matter of speed only.
        return_state: whether to return final states. Documents run faster without.
        implementation: "auto" or one of `available()`.

    Returns:
        MesaOutput, see there. Gradients flow to q, k, v, log_gamma, beta, lam and both initial states, from o and both
        final states; they are those of the exact solve (implicit differentiation, appendix D). All is computed in
        float32, or in float64 if q is float64, under autocast as well.

    Raises:
        ValueError: shapes or document bounds do not fit together, or the implementation is unknown.
    """
    B, T, h, D = q.shape
    _check_shapes(
        {"k": k, "v": v[..., :0], "log_gamma": log_gamma, "beta": beta, "lam": lam},
        {"k": (B, T, h, D), "v": (B, T, h, 0), "log_gamma": (B, T, h), "beta": (B, T, h), "lam": (h, D)},
    )
    sequences = B
    if cu_seqlens is not None:
        _check_bounds(cu_seqlens, B, T)
        sequences = len(cu_seqlens) - 1
    if initial_state is not None:
        _check_state(initial_state, (sequences, h, v.shape[-1], D))
    form = _implementations[resolve(implementation, q.device)].mesa
    return form(
        q,
        k,
        v,
        log_gamma,
        beta,
        lam,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        max_steps=max_steps,
        tolerance=tolerance,
        chunk_size=chunk_size,
        return_state=return_state,
    )


@torch.no_grad()
def mesa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor,
    beta: Tensor,
    lam: Tensor,
    state: MesaState,
    *,
    max_steps: int = 30,
    tolerance: float = 1e-4,
    implementation: str = "auto",
) -> MesaOutput:
    """One token of `mesa`, for generation; no gradients.

    q, k [B, h, D]; v [B, h, Dv]; log_gamma, beta [B, h]; lam [h, D]; state of B sequences. Returns o [B, h, Dv], the
    new state (the given one stays as it is), steps and residual [B, h]. Raises ValueError as `mesa` does.
    """
    B, h, D = q.shape
    _check_shapes(
        {"k": k, "v": v[..., :0], "log_gamma": log_gamma, "beta": beta, "lam": lam},
        {"k": (B, h, D), "v": (B, h, 0), "log_gamma": (B, h), "beta": (B, h), "lam": (h, D)},
    )
    _check_state(state, (B, h, v.shape[-1], D))
    form = _implementations[resolve(implementation, q.device)].mesa_step
    return form(q, k, v, log_gamma, beta, lam, state, max_steps=max_steps, tolerance=tolerance)


def _check_shapes(given: dict[str, Tensor], wanted: dict[str, tuple[int, ...]]) -> None:
    for name, tensor in given.items():
        if tensor.shape != wanted[name]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)} where q calls for {wanted[name]}.")


def _check_state(state: MesaState, shape: tuple[int, int, int, int]) -> None:
    N, h, Dv, D = shape
    _check_shapes({"state.H": state.H, "state.G": state.G}, {"state.H": (N, h, D, D), "state.G": (N, h, Dv, D)})


def _check_bounds(cu_seqlens: Tensor, batch: int, length: int) -> None:
    if batch != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, not {batch}; flatten the batch into one row.")
    bounds = cu_seqlens.cpu()
    if bounds[0] != 0 or bounds[-1] != length or (bounds.diff() < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to {length}, the number of tokens, without falling.")
