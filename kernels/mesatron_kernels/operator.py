"""The Mesa operator: one signature, several named implementations."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mesatron_kernels import chunkwise, reference
from mesatron_kernels.documents import documents_of
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


class Choice(NamedTuple):
    """The name of an implementation, and why it is that one, in a few words."""

    implementation: str
    reason: str


def forms(name: str) -> Implementation:
    """The implementation of that name. Raises ValueError for an unknown one."""
    if name not in _implementations:
        known = ", ".join(["auto", *_implementations])
        raise ValueError(f"Mesa implementation {name!r} is unknown; choose one of {known}.")
    return _implementations[name]


@torch.compiler.assume_constant_result
def resolve(name: str, device: torch.device | str, dtype: torch.dtype, head_size: int) -> Choice:
    """The implementation that `name` stands for on a device, for q, k and v of `dtype`; only "auto" stands for another.

    "auto" is triton on GPUs where `selfcheck` finds it right for the dtype and head size, torch elsewhere. The first
    time on a machine it runs that check, up to a minute; after that it costs a look into a dictionary.

    Raises ValueError for an unknown name, and for triton where the check is known to have failed.
    """
    device = torch.device(device)
    if name != "auto":
        forms(name)
        if name == "triton" and device.type == "cuda":
            from mesatron_kernels.selfcheck import refusal

            reason = refusal(dtype, head_size, device)
            if reason:
                raise ValueError(
                    f"The triton implementation of mesa fails its self-check here for {dtype} and head size "
                    f"{head_size} ({reason}); choose torch, or another version of Triton."
                )
        return Choice(name, "as asked")
    if device.type != "cuda":
        return Choice("torch", "no GPU")
    reason = _why_not_triton(dtype, head_size, device)
    return Choice("torch", reason) if reason else Choice("triton", "its self-check passed")


def _why_not_triton(dtype: torch.dtype, head_size: int, device: torch.device) -> str | None:
    try:
        from mesatron_kernels.launch import LARGEST_HEAD
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    from mesatron_kernels.selfcheck import LIMITS, check_pair

    if dtype not in LIMITS:
        return f"triton has no {dtype}"
    if head_size > LARGEST_HEAD or head_size % 16:
        return f"triton takes head sizes that are multiples of 16 up to {LARGEST_HEAD}, not {head_size}"
    failure = check_pair(dtype, head_size, device).failure
    return failure and f"triton failed its self-check: {failure}"


def _triton_mesa(*args, **kwargs) -> MesaOutput:
    # Imported at first use: a machine without a GPU needs no triton, whose interpreter is chosen while it is imported.
    from mesatron_kernels import triton_chunkwise

    return triton_chunkwise.mesa(*args, **kwargs)


def _triton_step(*args, **kwargs) -> MesaOutput:
    from mesatron_kernels import triton_step

    return triton_step.mesa_step(*args, **kwargs)


register("reference", Implementation(reference.mesa, reference.mesa_step))
register("torch", Implementation(chunkwise.mesa, chunkwise.mesa_step))
register("triton", Implementation(_triton_mesa, _triton_step))


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
            0 goes on until float32 has no more to give. Implementations may start the solve from different points.
        chunk_size: tokens treated together; a matter of speed only.
        return_state: whether to return final states. Documents run faster without.
        implementation: "auto" or one of `available()`.

    Returns:
        MesaOutput, see there. Gradients flow to q, k, v, log_gamma, beta, lam and both initial states, from o and both
        final states; they are those of the exact solve (implicit differentiation, appendix D). All is computed in
        float32, or in float64 if q is float64, under autocast as well.

    Raises:
        ValueError: shapes or document bounds do not fit together, or the implementation is unknown or refused.
    """
    B, T, h, D = q.shape
    _check_shapes(
        {"k": k, "v": v[..., :0], "log_gamma": log_gamma, "beta": beta, "lam": lam},
        {"k": (B, T, h, D), "v": (B, T, h, 0), "log_gamma": (B, T, h), "beta": (B, T, h), "lam": (h, D)},
    )
    sequences = B
    if cu_seqlens is not None:
        if not torch.compiler.is_compiling():
            _check_bounds(cu_seqlens, B, T)
        sequences = len(cu_seqlens) - 1
    if initial_state is not None:
        _check_state(initial_state, (sequences, h, v.shape[-1], D))
    form = forms(resolve(implementation, q.device, q.dtype, _head_size(q, v)).implementation).mesa
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
    form = forms(resolve(implementation, q.device, q.dtype, _head_size(q, v)).implementation).mesa_step
    return form(q, k, v, log_gamma, beta, lam, state, max_steps=max_steps, tolerance=tolerance)


def _head_size(q: Tensor, v: Tensor) -> int:
    """The head size that an implementation is chosen by: the more demanding one of q and v."""
    return max(q.shape[-1], v.shape[-1], key=lambda size: (size % 16 > 0, size))


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
    bounds = documents_of(cu_seqlens).bounds
    if bounds[0] != 0 or bounds[-1] != length or (bounds.diff() < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to {length}, the number of tokens, without falling.")
