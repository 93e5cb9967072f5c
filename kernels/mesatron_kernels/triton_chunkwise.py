"""The Mesa operator on a GPU: which Triton kernel runs when, and the gradient.

Forward: states before every chunk, then one program per chunk and head solves for q* and reads o off. Backward: the
states again (kept, they would take 2.7 times the room of q, k and v), e* by a second solve, the states' cotangents from
back to front, and the gradients of the inputs chunk by chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import custom_op, get_ctx
from torch.nn.functional import pad

from mesatron_kernels import triton_gradients, triton_solve, triton_states
from mesatron_kernels.launch import check_inputs, chunk_length, shared_bytes
from mesatron_kernels.state import MesaOutput, MesaState
from mesatron_kernels.triton_tiles import INTERPRETED

# Where the norm of H exceeds this many times the smallest Lambda, low terms are kept too: high ones alone are off by
# 2^-12, which the inverse enlarges by that ratio.
HARDNESS = 16.0
SHORTEST_PIECE = 1 if INTERPRETED.value else 8  # chunks
BLOCK_HEADS = 16  # heads whose gates' gradients one program forms


class Layout(NamedTuple):
    """How tokens lie in sequences and chunks, as the kernels take it (see `triton_tiles.load_chunk`).

    A scan's sequences are these, or pieces of them where they are too long and too few to fill the GPU.
    """

    chunks: Tensor | None  # int32 [c, 2]
    sequences: Tensor | None  # int32 [S + 1]
    first_chunk: Tensor | None  # int32 [S + 1]
    length: int
    per_sequence: int
    chunk_count: int  # c
    scan_count: int  # S, sequences or pieces
    first_piece: Tensor | None  # int32 [sequences + 1], if S counts pieces


class States(NamedTuple):
    """States of all chunks [c, heads, E, D], as scale (high + low)."""

    high: Tensor
    low: Tensor
    scale: Tensor  # float32 [c, heads]


class Solution(NamedTuple):
    """Solved rows [B, T, heads, D], as size (high + low)."""

    high: Tensor
    low: Tensor
    size: Tensor  # float32 [B, T, heads]


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

    With 16-bit inputs k is taken in float16: beta |k| must stay below some 10,000, and beta |k|^2 not far below
    lambda / 1000 (in the Mesa layer |k| is 1). The gradient of the
    initial H, which is symmetric, is the symmetric part.

    Raises ValueError for tensors off the GPU, float64, several dtypes, or heads that the kernels do not hold.
    """
    check_inputs("mesa", q, k, v)
    states = (None, None) if initial_state is None else initial_state
    o, H, G, steps, residual, *_ = _forward(q, k, v, log_gamma, beta, lam, *states, cu_seqlens, max_steps, tolerance)
    return MesaOutput(o, MesaState(H, G) if return_state else None, steps, residual)


_Twelve = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@custom_op("mesatron::mesa_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, lam: Tensor, H_0: Tensor | None,
    G_0: Tensor | None, cu_seqlens: Tensor | None, max_steps: int, tolerance: float,
) -> _Twelve:  # fmt: skip
    """o, final H and G, steps, residual, and what the backward pass needs: keys, summed, norms, largest, q*."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    log_gamma, beta, lam = (x.float().contiguous() for x in (log_gamma, beta, lam))
    layout, shape = _layout(k, v, cu_seqlens), _shape(k, v)
    table = (layout.chunks, layout.length, layout.per_sequence, k.shape[2])
    keys = torch.empty_like(k, dtype=torch.float16) if k.dtype == torch.bfloat16 else k.new_empty(0)
    summed, norms = torch.empty_like(beta), beta.new_empty(layout.chunk_count, k.shape[2], 2)
    largest = beta.new_empty(2, layout.chunk_count, k.shape[2])
    triton_states.prepare[(layout.chunk_count, k.shape[2])](
        k, v, log_gamma, beta, keys if len(keys) else None, summed, norms, largest, *table, **shape, num_warps=8
    )  # fmt: skip
    k = keys if len(keys) else k
    H, G, hard, H_last, G_last, _ = _states(k, v, beta, summed, norms, largest, lam, H_0, G_0, layout)
    if layout.first_piece is not None:
        ends = layout.first_piece[1:] - 1
        H_last, G_last = H_last[ends], G_last[ends]
    solution = _solution(k)
    o, steps, residual = torch.empty_like(v), torch.empty_like(beta, dtype=torch.int32), torch.empty_like(beta)
    triton_solve.solve_forward[(layout.chunk_count, k.shape[2])](
        q, k, v, beta, summed, lam, *H, *G, hard, *solution, o, steps, residual, *table, max_steps, tolerance,
        **shape, num_warps=4, num_stages=1,
    )  # fmt: skip
    return o, H_last, G_last, steps, residual, keys, summed, norms, largest, *solution


@_forward.register_fake
def _(q, k, v, log_gamma, beta, lam, H_0, G_0, cu_seqlens, max_steps, tolerance):
    (B, T, heads, D), E = k.shape, v.shape[-1]
    documents = B if cu_seqlens is None else len(cu_seqlens) - 1
    chunks = get_ctx().new_dynamic_size() if cu_seqlens is not None else B * -(-T // _chunk_length(k, v))
    gates = beta.new_empty(B, T, heads, dtype=torch.float32)
    states = gates.new_empty(documents, heads, D, D), gates.new_empty(documents, heads, E, D)
    keys = k.new_empty(k.shape, dtype=torch.float16) if k.dtype == torch.bfloat16 else k.new_empty(0)
    chunkwise = gates.new_empty(chunks, heads, 2), gates.new_empty(2, chunks, heads)
    steps = torch.empty_like(gates, dtype=torch.int32)
    return v.new_empty(v.shape), *states, steps, gates, keys, torch.empty_like(gates), *chunkwise, *_solution(k)


@custom_op("mesatron::mesa_backward", mutates_args=())
def _backward(
    e: Tensor, dH_last: Tensor | None, dG_last: Tensor | None, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor,
    lam: Tensor, H_0: Tensor | None, G_0: Tensor | None, cu_seqlens: Tensor | None, summed: Tensor, norms: Tensor,
    largest: Tensor, q_high: Tensor, q_low: Tensor, q_size: Tensor, max_steps: int, tolerance: float,
) -> _Eight:  # fmt: skip
    """Gradients of q, k, v, log_gamma, beta, lam and of both initial states; k is as the forward pass left it."""
    e, k, v = e.contiguous(), k.contiguous(), v.contiguous()
    dq = torch.empty_like(k, dtype=v.dtype)
    log_gamma, beta, lam = (x.float().contiguous() for x in (log_gamma, beta, lam))
    layout, shape, heads = _layout(k, v, cu_seqlens), _shape(k, v), k.shape[2]
    table, q_star = (layout.chunks, layout.length, layout.per_sequence), Solution(q_high, q_low, q_size)
    H, G, hard, H_last, G_last, decay = _states(k, v, beta, summed, norms, largest, lam, H_0, G_0, layout)
    e_star, row_sums = _solution(k), torch.empty_like(beta)
    dlam, added = lam.new_empty(layout.chunk_count, *lam.shape), torch.empty_like(largest)
    triton_solve.solve_backward[(layout.chunk_count, heads)](
        e, k, v, beta, summed, lam, *H, *G, hard, *q_star, *e_star, dq, row_sums, dlam, added,
        *table, heads, max_steps, tolerance, **shape, num_warps=4, num_stages=1,
    )  # fmt: skip

    def cotangents(forward: States, final: Tensor | None, last: Tensor, is_H: bool) -> tuple[States, Tensor, Tensor]:
        # The high terms of the forward states give their room to the cotangents.
        states = States(forward.high, torch.empty_like(forward.low), torch.empty_like(forward.scale))
        before, across = torch.empty_like(last), torch.empty_like(forward.scale)
        state_rows = {"E": last.shape[-2], "BLOCK_E": _block(last.shape[-2], k)}

        def scan(final: Tensor | None, across: Tensor | None) -> None:
            triton_states.backward_states[(layout.scan_count, heads)](
                e, *q_star, *e_star, summed, added[0 if is_H else 1], final, *states, before, *forward[1:], last, hard,
                across, *layout[1:5], heads, IS_H=is_H, **_shape(k, v) | state_rows, **_wide(last.shape[-2]),
            )  # fmt: skip

        if layout.first_piece is None or decay is None:
            scan(final, across)
            return states, before, across
        scan(None, None)
        scan(_entering(before, decay, final, layout.first_piece, backward=True), across)
        return states, before[layout.first_piece[:-1]], across

    final_H = None if dH_last is None else -(dH_last + dH_last.mT).float().contiguous()
    dH, dH_0, across_H = cotangents(H, final_H, H_last, True)
    del H
    dG, dG_0, across_G = cotangents(G, None if dG_last is None else dG_last.float().contiguous(), G_last, False)
    del G
    dk, dv = torch.empty_like(dq), torch.empty_like(v)  # not before the forward states have gone
    dlog_gamma, dbeta = torch.empty_like(beta), torch.empty_like(beta)
    triton_gradients.backward_inputs[(layout.chunk_count, heads)](
        k, v, beta, summed, *q_star, *e_star, e, *dH, *dG, hard, dk, dv, dbeta,
        *table, heads, **shape, **_wide(max(k.shape[-1], v.shape[-1])),
    )  # fmt: skip
    triton_gradients.backward_gates[(layout.chunk_count, -(-heads // BLOCK_HEADS))](
        log_gamma, beta, row_sums, dbeta, across_H, across_G, dlog_gamma, *table, heads,
        BLOCK_HEADS=BLOCK_HEADS, L=shape["L"], num_warps=4,
    )  # fmt: skip
    return dq, dk, dv, dlog_gamma, dbeta, dlam.sum(0), -0.5 * dH_0, dG_0


@_backward.register_fake
def _(e, dH, dG, k, v, log_gamma, beta, lam, H_0, G_0, cu_seqlens, *_):
    (B, _, heads, D), E = k.shape, v.shape[-1]
    documents = B if cu_seqlens is None else len(cu_seqlens) - 1
    states = (beta.new_empty(documents, heads, size, D, dtype=torch.float32) for size in (D, E))
    gates = (x.new_empty(x.shape, dtype=torch.float32) for x in (beta, beta, lam))
    return *(v.new_empty(x.shape) for x in (k, k, v)), *gates, *states


def _setup_context(ctx: Any, inputs: tuple, output: _Twelve) -> None:
    _, k, v, log_gamma, beta, lam, H_0, G_0, cu_seqlens, ctx.max_steps, ctx.tolerance = inputs
    keys, *rest = output[5:]
    ctx.save_for_backward(keys if len(keys) else k, v, log_gamma, beta, lam, H_0, G_0, cu_seqlens, *rest)
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, e: Tensor | None, dH: Tensor | None, dG: Tensor | None, *_: None) -> tuple:
    k, v, log_gamma, beta, lam, H_0, *rest = ctx.saved_tensors
    e = torch.zeros_like(v) if e is None else e
    *inputs, dH_0, dG_0 = _backward(e, dH, dG, k, v, log_gamma, beta, lam, H_0, *rest, ctx.max_steps, ctx.tolerance)
    start = (None, None) if H_0 is None else (dH_0, dG_0)
    return *inputs, *start, None, None, None


_forward.register_autograd(_gradient, setup_context=_setup_context)


def _layout(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Layout:
    """Cut the rows, or the documents in one row, into chunks."""
    batch, length, L = v.shape[0], v.shape[1], _chunk_length(k, v)
    if cu_seqlens is None:
        per_sequence = -(-length // L)
        bounds, longest = torch.arange(batch + 1, device=v.device) * length, per_sequence
        whole = Layout(None, None, None, length, per_sequence, batch * per_sequence, batch, None)
    else:
        bounds = cu_seqlens.to(v.device).long()
        counts = (bounds.diff() + L - 1) // L
        owner = torch.repeat_interleave(counts)
        first_chunk = pad(counts.cumsum(0), (1, 0))
        begin = bounds[owner] + (torch.arange(len(owner), device=v.device) - first_chunk[owner]) * L
        chunks = torch.stack([begin, torch.minimum(begin + L, bounds[owner + 1])], 1).int()
        whole = Layout(chunks, bounds.int(), first_chunk.int(), length, 0, len(chunks), len(counts), None)
        longest = int(counts.max())
    piece = _piece_length(whole.chunk_count, longest, k)
    if piece is None:
        return whole
    sequences, first_chunk, first_piece = _pieces(bounds, piece, L)
    return whole._replace(
        sequences=sequences, first_chunk=first_chunk, scan_count=len(sequences) - 1, first_piece=first_piece
    )


def _piece_length(chunks: int, longest: int, k: Tensor) -> int | None:
    """Chunks of a piece if the longest sequence, of so many of all chunks, is to be scanned in pieces.

    Pieces are scanned twice, first for what each adds to a state and then from the state that enters it, so they pay
    where one sequence has several times its part of a GPU's work.
    """
    fair = max(SHORTEST_PIECE, -(-chunks * k.shape[2] // _processors(k)))
    return fair if longest > 4 * fair else None


def _pieces(bounds: Tensor, piece: int, L: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of pieces of up to `piece` chunks, each one's first chunk, and each sequence's first piece, int32."""
    counts = (bounds.diff() + L - 1) // L
    pieces = ((counts + piece - 1) // piece).clamp(min=1)  # an empty one keeps its state
    owner = torch.repeat_interleave(pieces)
    first_piece = pad(pieces.cumsum(0), (1, 0))
    ahead = (torch.arange(len(owner), device=bounds.device) - first_piece[owner]) * piece
    first_chunk = pad(counts.cumsum(0), (1, 0))
    sequences = torch.cat([bounds[owner] + ahead * L, bounds[-1:]])
    chunks = torch.cat([first_chunk[owner] + ahead, first_chunk[-1:]])
    return sequences.int(), chunks.int(), first_piece.int()


def _processors(k: Tensor) -> int:
    """Multiprocessors of the GPU; few under the interpreter, so that short sequences come in pieces there."""
    return 16 if INTERPRETED.value else torch.cuda.get_device_properties(k.device).multi_processor_count


def _states(
    k: Tensor, v: Tensor, beta: Tensor, summed: Tensor, norms: Tensor, largest: Tensor, lam: Tensor,
    H_0: Tensor | None, G_0: Tensor | None, layout: Layout,
) -> tuple[States, States, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """H and G before every chunk, which chunks are hard, H and G after every sequence or piece of one, and the decay
    over each piece.
    """
    heads = k.shape[2]
    hard = torch.empty(layout.chunk_count, heads, dtype=torch.int32, device=k.device)

    def empty(w: Tensor) -> tuple[States, Tensor]:
        high = k.new_empty(layout.chunk_count, heads, w.shape[-1], k.shape[-1], dtype=_state_type(k))
        states = States(high, _low_like(high), beta.new_empty(layout.chunk_count, heads))
        return states, beta.new_empty(layout.scan_count, heads, w.shape[-1], k.shape[-1])

    (H, H_last), (G, G_last) = empty(k), empty(v)

    def scan(H_0: Tensor | None, G_0: Tensor | None, decay: Tensor | None) -> None:
        triton_states.forward_states[(layout.scan_count, heads, 2)](
            k, v, beta, summed, norms, *largest, lam, H_0, G_0, *H, *G, hard, H_last, G_last, decay, *layout[1:5],
            heads, HARDNESS, **_shape(k, v), **_wide(max(k.shape[-1], v.shape[-1])),
        )  # fmt: skip

    H_0, G_0 = (None if x is None else x.float().contiguous() for x in (H_0, G_0))
    if layout.first_piece is None:
        scan(H_0, G_0, None)
        return H, G, hard, H_last, G_last, None
    decay = beta.new_empty(layout.scan_count, heads)
    scan(None, None, decay)
    H_0, G_0 = (
        _entering(added, decay, initial, layout.first_piece, backward=False)
        for added, initial in ((H_last, H_0), (G_last, G_0))
    )
    scan(H_0, G_0, None)
    return H, G, hard, H_last, G_last, decay


def _entering(
    added: Tensor, decay: Tensor, outer: Tensor | None, first_piece: Tensor, *, backward: bool
) -> Tensor:  # fmt: skip
    """The state that enters each piece; see `triton_states.combine`."""
    _, heads, height, width = added.shape
    result, size, block = torch.empty_like(added), height * width, 1024
    triton_states.combine[(len(first_piece) - 1, heads, -(-size // block))](
        added, decay, outer, result, first_piece, heads, size, BACKWARD=backward, BLOCK=block
    )
    return result


def _solution(k: Tensor) -> Solution:
    high = torch.empty_like(k, dtype=_state_type(k), memory_format=torch.contiguous_format)
    return Solution(high, _low_like(high), high.new_empty(high.shape[:3], dtype=torch.float32))


def _low_like(high: Tensor) -> Tensor:
    """Room for the low terms; float32 has none."""
    return torch.empty_like(high) if high.dtype == torch.float16 else high.new_empty(0)


def _state_type(inputs: Tensor) -> torch.dtype:
    return torch.float16 if _precision(inputs) in ("bf16", "fp16") else torch.float32


def _shape(k: Tensor, v: Tensor) -> dict[str, Any]:
    """Compile-time arguments of the kernels that take one chunk."""
    D, E = k.shape[-1], v.shape[-1]
    sizes = {"D": D, "E": E, "BLOCK_D": _block(D, k), "BLOCK_E": _block(E, k)}
    return sizes | {"L": _chunk_length(k, v), "PRECISION": _precision(v)}


def _wide(size: int) -> dict[str, int]:
    """Launch arguments of kernels that hold states or rows of `size` columns: 64 a group of 4 warps."""
    return {"num_warps": 8 if size > 64 else 4, "num_stages": 1}


def _chunk_length(k: Tensor, v: Tensor) -> int:
    """Tokens of a chunk: what leaves room in the GPU's shared memory."""
    if INTERPRETED.value:
        return 64
    return chunk_length(v.dtype, max(k.shape[-1], v.shape[-1]), shared_bytes(v.device))


def _block(size: int, inputs: Tensor) -> int:
    """Columns of a tile; in 16 bits at least 64: with tiles of 32 by 16, Triton 3.6 on Hopper gave wrong results."""
    narrowest = 16 if INTERPRETED.value or inputs.dtype == torch.float32 else 64
    return max(narrowest, triton.next_power_of_2(size))


def _precision(inputs: Tensor) -> str:
    exact = "ieee" if INTERPRETED.value else "tf32x3"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(inputs.dtype, exact)
