"""The Mesa operator on a GPU: which Triton kernel runs when, and the gradient.

Forward: states before every chunk, then one program per chunk and head solves for q* and reads o off. Backward: the
states again (kept, they would take 2.7 times the room of q, k and v), e* by a second solve, the
states' cotangents from back to front, and the gradients of the inputs chunk by chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.runtime.interpreter import InterpretedFunction

from mesatron_kernels import triton_kernels as kernels
from mesatron_kernels.state import MesaOutput, MesaState

LARGEST_HEAD = 128  # channels of a head at most
# Where the norm of H exceeds this many times the smallest Lambda, the solver takes H in two 16-bit terms: one alone
# is off by 2^-12 of that norm.
HARDNESS = 64.0
STATE_ROWS = 64  # rows of a state that one program of the scans holds
GRADIENT_COLUMNS = 64  # columns of dk and dv that one program forms


class Chunking(NamedTuple):
    """How tokens lie in chunks: see `triton_kernels`."""

    chunks: Tensor  # int32 [c, 2]
    first_chunk: Tensor  # int32 [sequences + 1]
    sequences: int


class States(NamedTuple):
    """A state before every chunk [c, heads, E, D], as scale (high + low), and after every sequence."""

    high: Tensor
    low: Tensor
    scale: Tensor  # float32 [c, heads]; 1 throughout unless the state is H
    norms: Tensor  # float32 [c, heads, blocks]: squared norm of every block of rows, if the state is H
    final: Tensor  # float32 [sequences, heads, E, D]


def chunking(batch: int, length: int, cu_seqlens: Tensor | None, L: int, device: torch.device) -> Chunking:
    """Cut `batch` rows of `length` tokens, or the documents in one row, into chunks of up to L tokens."""
    if cu_seqlens is None:
        begins = torch.arange(batch, device=device) * length
        ends = begins + length
        count = batch * -(-length // L)
    else:
        begins, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        count = None
    per_sequence = (ends - begins + L - 1) // L
    first_chunk = torch.nn.functional.pad(per_sequence.cumsum(0), (1, 0))
    sequence = torch.repeat_interleave(per_sequence, output_size=count)
    chunk = torch.arange(len(sequence), device=device)
    begin = begins[sequence] + (chunk - first_chunk[sequence]) * L
    table = torch.stack([begin, torch.minimum(begin + L, ends[sequence])], 1)
    return Chunking(table.int(), first_chunk.int(), len(begins))


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
    """Triton form of `mesatron_kernels.mesa`, where the arguments are described; `chunk_size` is not used.

    The gradient of the initial H, which is symmetric, is the symmetric part.

    Raises ValueError for tensors off the GPU, float64, or heads that the kernels do not hold.
    """
    _check(q, v)
    layout = chunking(q.shape[0], q.shape[1], cu_seqlens, _chunk_length(q), q.device)
    states = (None, None) if initial_state is None else initial_state
    o, H, G, steps, residual = _Mesa.apply(q, k, v, log_gamma, beta, lam, *states, layout, max_steps, tolerance)
    return MesaOutput(o, MesaState(H, G) if return_state else None, steps, residual)


class _Mesa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, log_gamma, beta, lam, H_0, G_0, layout: Chunking, max_steps: int, tolerance: float):
        q, k, v = (x.contiguous() for x in (q, k, v))
        log_gamma, beta, lam = (x.float().contiguous() for x in (log_gamma, beta, lam))
        H, G = _states(k, v, log_gamma, beta, H_0, G_0, layout)
        q_star = torch.empty_like(q, dtype=torch.float32)
        steps = torch.empty(q.shape[:3], dtype=torch.int32, device=q.device)
        residual = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        outputs = {"x": q_star, "steps": steps, "residual": residual}
        _solve(q, k, log_gamma, beta, lam, H, layout, max_steps, tolerance, adjoint=False, **outputs)
        o = torch.empty_like(v)
        _read_out(q_star, k, v, log_gamma, beta, G, layout, o, transposed=False)
        ctx.save_for_backward(k, v, log_gamma, beta, lam, q_star, H_0, G_0)
        ctx.layout, ctx.max_steps, ctx.tolerance, ctx.q_type = layout, max_steps, tolerance, q.dtype
        ctx.mark_non_differentiable(steps, residual)
        ctx.set_materialize_grads(False)
        return o, H.final, G.final, steps, residual

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, e, dH_last, dG_last, *_):
        k, v, log_gamma, beta, lam, q_star, H_0, G_0 = ctx.saved_tensors
        layout, heads, shape = ctx.layout, k.shape[2], _shape(k, v)
        chunks, sequences = layout.chunks, layout.sequences
        e = torch.zeros_like(v) if e is None else e.contiguous()
        H, G = _states(k, v, log_gamma, beta, H_0, G_0, layout)
        sides = torch.empty_like(q_star)
        _read_out(e, k, v, log_gamma, beta, G, layout, sides, transposed=True)
        e_star, dq = torch.empty_like(q_star), torch.empty_like(k, dtype=ctx.q_type)
        row_sums = torch.empty_like(beta)
        dlam = lam.new_empty(len(chunks), *lam.shape)
        outputs = {"x": e_star, "q_star": q_star, "dq": dq, "row_sums": row_sums, "dlam": dlam}
        solver = (layout, ctx.max_steps, ctx.tolerance)
        _solve(sides, k, log_gamma, beta, lam, H, *solver, adjoint=True, **outputs)

        def cotangents(a: Tensor, b: Tensor, forward: States, final: Tensor | None, symmetric: bool):
            height, width = a.shape[-1], b.shape[-1]
            high, low = _split_like(k, len(chunks), heads, height, width, scaled=False)
            before = torch.empty_like(forward.final)
            blocks = -(-height // STATE_ROWS)
            across = lam.new_empty(len(chunks), heads, blocks)
            kernels.backward_states[(sequences * heads, blocks)](
                a, b, log_gamma, final, high, low, before, forward.high, forward.low, forward.scale, forward.final,
                across, chunks, layout.first_chunk, heads, **_shape(b, a, k) | {"BLOCK_E": STATE_ROWS},
                SYMMETRIC=symmetric, HAS_FINAL=final is not None, SCALED=symmetric, num_warps=4, num_stages=1,
            )  # fmt: skip
            return high, low, before, across

        final_H = None if dH_last is None else -(dH_last + dH_last.mT).contiguous()
        final_G = None if dG_last is None else dG_last.contiguous()
        dH_high, dH_low, dH_0, across_H = cotangents(q_star, e_star, H, final_H, symmetric=True)
        dG_high, dG_low, dG_0, across_G = cotangents(e, q_star, G, final_G, symmetric=False)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        dlog_gamma, dbeta = torch.empty_like(beta), torch.empty_like(beta)
        blocks = -(-max(shape["BLOCK_D"], shape["BLOCK_E"]) // GRADIENT_COLUMNS)
        dbeta_parts = beta.new_empty(blocks, *beta.shape)
        kernels.backward_inputs[(len(chunks), heads, blocks)](
            k, v, log_gamma, beta, q_star, e_star, e, dH_high, dH_low, dG_high, dG_low, chunks, dk, dv, dbeta_parts,
            beta.numel() // heads, heads, **shape, COLUMNS=GRADIENT_COLUMNS, num_warps=4, num_stages=1,
        )  # fmt: skip
        block_heads = min(16, _block(heads))
        kernels.backward_gates[(len(chunks), -(-heads // block_heads))](
            log_gamma, beta, row_sums, dbeta_parts, across_H, across_G, chunks, dlog_gamma, dbeta,
            beta.numel() // heads, heads,
            BLOCKS=blocks, PARTS_H=across_H.shape[-1], PARTS_G=across_G.shape[-1], BLOCK_HEADS=block_heads,
            L=shape["L"], num_warps=4,
        )  # fmt: skip
        start = (None, None) if H_0 is None else (-0.5 * dH_0, dG_0)
        return dq, dk, dv, dlog_gamma, dbeta, dlam.sum(0), *start, None, None, None


def _solve(
    b, k, log_gamma, beta, lam, H: States, layout: Chunking, max_steps: int, tolerance: float, *, adjoint: bool,
    x, steps=None, residual=None, q_star=None, dq=None, row_sums=None, dlam=None,
) -> None:  # fmt: skip
    """Launch `kernels.solve`."""
    shape, heads = _shape(k, k), k.shape[2]
    kernels.solve[(len(layout.chunks), heads)](
        b, k, log_gamma, beta, lam, *H[:4], layout.chunks, x, steps, residual, q_star, dq, row_sums, dlam,
        heads, max_steps, tolerance, HARDNESS, D=shape["D"], BLOCK_D=shape["BLOCK_D"], L=shape["L"],
        TILES=H.norms.shape[-1], ADJOINT=adjoint, PRECISION=shape["PRECISION"], num_warps=4, num_stages=1,
    )  # fmt: skip


def _read_out(x, k, v, log_gamma, beta, G: States, layout: Chunking, y: Tensor, *, transposed: bool) -> None:
    """Launch `kernels.read_out`."""
    heads = k.shape[2]
    kernels.read_out[(len(layout.chunks), heads)](
        x, k, v, log_gamma, beta, *G[:2], layout.chunks, y, heads, **_shape(k, v), TRANSPOSED=transposed,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _states(k, v, log_gamma, beta, H_0, G_0, layout: Chunking) -> tuple[States, States]:
    """H and G; the kernels take H in float16 terms and G in bfloat16 ones where the inputs have 16 bits."""
    heads, c = k.shape[2], len(layout.chunks)

    def sums(w: Tensor, initial: Tensor | None, scaled: bool) -> States:
        E, D = w.shape[-1], k.shape[-1]
        blocks = -(-E // STATE_ROWS)
        high, low = _split_like(k, c, heads, E, D, scaled=scaled)
        scale, norms = log_gamma.new_empty(c, heads), log_gamma.new_empty(c, heads, blocks)
        final = log_gamma.new_empty(layout.sequences, heads, E, D)
        kernels.forward_states[(layout.sequences * heads, blocks)](
            k, w, log_gamma, beta, initial, high, low, scale, norms, final, layout.chunks, layout.first_chunk, heads,
            **_shape(k, w) | {"BLOCK_E": STATE_ROWS}, HAS_INITIAL=initial is not None, SCALED=scaled,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        return States(high, low, scale, norms, final)

    return sums(k, H_0, True), sums(v, G_0, False)


def _split_like(inputs: Tensor, *shape: int, scaled: bool) -> tuple[Tensor, Tensor]:
    """Room for states in two 16-bit terms, or for inputs that are not 16-bit in one of float32."""
    if _precision(inputs) not in ("bf16", "fp16"):
        whole = inputs.new_empty(shape, dtype=torch.float32)
        return whole, whole
    high = inputs.new_empty(shape, dtype=torch.float16 if scaled else torch.bfloat16)
    return high, torch.empty_like(high)


def _shape(k: Tensor, w: Tensor, inputs: Tensor | None = None) -> dict[str, Any]:
    """The kernels' compile-time arguments for keys [..., D] and values [..., E]; precision is that of the `inputs`."""
    D, E = k.shape[-1], w.shape[-1]
    sizes = {"D": D, "E": E, "BLOCK_D": _block(D), "BLOCK_E": _block(E)}
    inputs = k if inputs is None else inputs
    return sizes | {"L": _chunk_length(inputs), "PRECISION": _precision(inputs)}


def _chunk_length(inputs: Tensor) -> int:
    """Tokens of a chunk: 64, or what leaves room in shared memory for float32 operands."""
    return 16 if _precision(inputs) == "tf32x3" else 64


def _block(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _precision(inputs: Tensor) -> str:
    if _interpreted():
        return "ieee"  # the interpreter's 16-bit products are wrong
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(inputs.dtype, "tf32x3")


def _check(q: Tensor, v: Tensor) -> None:
    if q.dtype == torch.float64:
        raise ValueError("The triton implementation of mesa has no float64; choose torch or reference.")
    if not q.is_cuda and not _interpreted():
        raise ValueError("The triton implementation of mesa needs tensors on a GPU; choose torch on a CPU.")
    for name, size in (("D", q.shape[-1]), ("Dv", v.shape[-1])):
        if size > LARGEST_HEAD or size % 16:
            raise ValueError(
                f"The triton implementation of mesa takes head sizes that are multiples of 16 up to {LARGEST_HEAD}, "
                f"but {name} is {size}; choose torch."
            )


def _interpreted() -> bool:
    return isinstance(kernels.solve, InterpretedFunction)
