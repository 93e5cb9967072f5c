"""The Mesa operator on a GPU: which Triton kernel runs when, and the gradient.

Forward: states before every chunk, then one program per chunk and head solves for q* and reads o off. Backward: the
states again (kept, they would take 2.7 times the room of q, k and v), e* by a second solve, the states' cotangents from
back to front, and the gradients of the inputs chunk by chunk. Both go through the batch in parts of some rows, whose
states alone are held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, library
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from mesatron_kernels import triton_gradients, triton_solve, triton_states
from mesatron_kernels.documents import documents_of, sent
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


class Part(NamedTuple):
    """A share of the batch that is worked on at a time."""

    rows: slice  # of the batch; sequences too
    chunks: slice
    layout: Layout  # of these rows


class States(NamedTuple):
    """States at the chunks' bounds [c + 1, heads, E, D], as scale (high + low)."""

    high: Tensor
    low: Tensor
    scale: Tensor  # float32 [c + 1, heads]


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
    lambda / 1000 (in the Mesa layer |k| is 1). The gradient of the initial H, which is symmetric, is the symmetric
    part.

    Raises ValueError for tensors off the GPU, float64, several dtypes, or heads that the kernels do not hold.
    """
    check_inputs("mesa", q, k, v)
    states = (None, None) if initial_state is None else initial_state
    apply = _forward if torch.compiler.is_compiling() else _Eager.apply
    o, H, G, steps, residual, *_ = apply(q, k, v, log_gamma, beta, lam, *states, cu_seqlens, max_steps, tolerance)
    return MesaOutput(o, MesaState(H, G) if return_state else None, steps, residual)


_Twelve = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Pair = tuple[Any, ...]  # tensors or None, of H and of G


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, lam: Tensor, H_0: Tensor | None,
    G_0: Tensor | None, cu_seqlens: Tensor | None, max_steps: int, tolerance: float,
) -> _Twelve:  # fmt: skip
    """o, final H and G, steps, residual, and what the backward pass needs: summed, norms, both largest, q*."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    log_gamma, beta, lam = (x.float().contiguous() for x in (log_gamma, beta, lam))
    heads, shape, parts = k.shape[2], _shape(k, v), _parts(k, v, cu_seqlens)
    chunk_count = sum(part.layout.chunk_count for part in parts)
    summed, norms = torch.empty_like(beta), beta.new_empty(chunk_count, heads, 2)
    largest_k, largest_v = (beta.new_empty(chunk_count, heads) for _ in range(2))
    H_last, G_last = (beta.new_empty(_sequences(k, cu_seqlens), heads, x.shape[-1], k.shape[-1]) for x in (k, v))
    solution = _solution(k)
    o, steps, residual = torch.empty_like(v), torch.empty_like(beta, dtype=torch.int32), torch.empty_like(beta)

    def solve(rows: slice, chunks: slice, layout: Layout) -> None:
        table = (layout.chunks, layout.length, layout.per_sequence, heads)
        of_chunks = (norms[chunks], largest_k[chunks], largest_v[chunks])
        triton_states.prepare[(layout.chunk_count, heads)](
            k[rows], v[rows], log_gamma[rows], beta[rows], summed[rows], *of_chunks, *table, **shape, num_warps=8
        )  # fmt: skip
        pairs = (k[rows], v[rows], beta[rows], summed[rows])
        ends: _Pair = (H_last[rows], G_last[rows])
        H, G, hard, ends, _ = _states(*pairs, *of_chunks, lam, _cut((H_0, G_0), rows), ends, layout)
        if layout.first_piece is not None:
            for whole, of_pieces in zip((H_last, G_last), ends, strict=True):
                whole[rows] = of_pieces[layout.first_piece[1:] - 1]
        triton_solve.solve_forward[(layout.chunk_count, heads)](
            q[rows], *pairs, lam, *H, *G, hard, *_cut(solution, rows), o[rows], steps[rows], residual[rows], *table,
            max_steps, tolerance, **shape, num_warps=4, num_stages=1,
        )  # fmt: skip

    for part in parts:
        solve(*part)
    return o, H_last, G_last, steps, residual, summed, norms, largest_k, largest_v, *solution


_forward = library.custom_op("mesatron::mesa_forward", _launch_forward, mutates_args=())


@_forward.register_fake
def _(q, k, v, log_gamma, beta, lam, H_0, G_0, cu_seqlens, max_steps, tolerance):
    B, T, heads, D = k.shape
    chunks = library.get_ctx().new_dynamic_size() if cu_seqlens is not None else B * -(-T // _chunk_length(k, v))
    gates = beta.new_empty(B, T, heads, dtype=torch.float32)
    last = (gates.new_empty(_sequences(k, cu_seqlens), heads, x.shape[-1], D) for x in (k, v))
    of_chunks = (gates.new_empty(chunks, heads, *pair) for pair in ((2,), (), ()))
    steps = torch.empty_like(gates, dtype=torch.int32)
    return v.new_empty(v.shape), *last, steps, gates, torch.empty_like(gates), *of_chunks, *_solution(k)


def _launch_backward(
    e: Tensor, dH_last: Tensor | None, dG_last: Tensor | None, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor,
    lam: Tensor, H_0: Tensor | None, G_0: Tensor | None, cu_seqlens: Tensor | None, summed: Tensor, norms: Tensor,
    largest_k: Tensor, largest_v: Tensor, q_high: Tensor, q_low: Tensor, q_size: Tensor, max_steps: int,
    tolerance: float,
) -> _Eight:  # fmt: skip
    """Gradients of q, k, v, log_gamma, beta, lam and of both initial states, empty where there are none."""
    e, k, v = e.contiguous(), k.contiguous(), v.contiguous()
    log_gamma, beta, lam = (x.float().contiguous() for x in (log_gamma, beta, lam))
    heads, shape = k.shape[2], _shape(k, v)
    q_star, e_star = Solution(q_high, q_low, q_size), _solution(k)
    # Each program of backward_inputs writes dk where the low terms of its own rows of e* were.
    dk = e_star.low.view(v.dtype) if len(e_star.low) else torch.empty_like(k)
    dv, dlog_gamma, dbeta = torch.empty_like(v), torch.empty_like(beta), torch.empty_like(beta)
    dlam = lam.new_empty(len(norms), *lam.shape)
    final = (
        None if dH_last is None else -(dH_last + dH_last.mT).float().contiguous(),
        None if dG_last is None else dG_last.float().contiguous(),
    )
    initial = tuple(None if x is None else lam.new_empty(x.shape) for x in (H_0, G_0))

    def differentiate(rows: slice, chunks: slice, layout: Layout) -> None:
        table = (layout.chunks, layout.length, layout.per_sequence, heads)
        of_chunks = (norms[chunks], largest_k[chunks], largest_v[chunks])
        pairs = (k[rows], v[rows], beta[rows], summed[rows])
        solved, gradient = (*_cut(q_star, rows), *_cut(e_star, rows)), e[rows]
        finals, initials = _cut(final, rows), _cut(initial, rows)
        ends: _Pair = tuple(None if x is None else torch.empty_like(x) for x in finals)
        H, G, hard, ends, decay = _states(*pairs, *of_chunks, lam, _cut((H_0, G_0), rows), ends, layout)
        keys = torch.empty_like(k[rows], dtype=torch.float16) if k.dtype == torch.bfloat16 else None
        row_sums, added = torch.empty_like(beta[rows]), beta.new_empty(2, layout.chunk_count, heads)
        triton_solve.solve_backward[(layout.chunk_count, heads)](
            gradient, *pairs, lam, *H, *G, hard, *solved, keys, row_sums, dlam[chunks], added, *table, max_steps,
            tolerance, **shape, num_warps=4, num_stages=1,
        )  # fmt: skip
        # A state before a chunk is the one after the chunk before it, and gives its room to its cotangent.
        after = [x[1:] for x in (*H, *G)]

        def scan(finals: _Pair, initials: _Pair, across: _Pair) -> None:
            triton_states.backward_states[(layout.scan_count, heads, 2)](
                gradient, *solved, summed[rows], *added, *finals, *after, *initials, *ends, hard, *across,
                *layout[1:5], heads, **shape, **_wide(k, v),
            )  # fmt: skip

        across = (torch.empty_like(hard, dtype=torch.float32), torch.empty_like(hard, dtype=torch.float32))
        if layout.first_piece is None or decay is None:
            scan(finals, initials, across)
        else:
            of_pieces = tuple(torch.empty_like(x) for x in ends)
            scan((None, None), of_pieces, (None, None))
            scan(_entering(of_pieces, decay, finals, layout.first_piece, backward=True), of_pieces, across)
            for whole, first in zip(initials, of_pieces, strict=True):
                if whole is not None:
                    whole.copy_(first[layout.first_piece[:-1]])
        triton_gradients.backward_inputs[(layout.chunk_count, heads)](
            k[rows] if keys is None else keys, *pairs[1:], *solved, gradient, *after, hard, dk[rows], dv[rows],
            dbeta[rows], *table, **shape, **_wide(k, v),
        )  # fmt: skip
        triton_gradients.backward_gates[(layout.chunk_count, -(-heads // BLOCK_HEADS))](
            log_gamma[rows], beta[rows], row_sums, dbeta[rows], *across, dlog_gamma[rows], *table,
            BLOCK_HEADS=BLOCK_HEADS, L=shape["L"], num_warps=4,
        )  # fmt: skip

    for part in _parts(k, v, cu_seqlens):
        differentiate(*part)
    dq, N = e_star.high.view(v.dtype), beta.numel() // heads
    sizes = {name: shape[name] for name in ("D", "BLOCK_D", "L")}
    triton_gradients.backward_queries[(-(-N // sizes["L"]), heads)](
        e_star.high, e_star.size, dq, N, heads, **sizes, num_warps=4
    )
    dH_0, dG_0 = (lam.new_empty(0) if x is None else x for x in initial)
    return dq, dk, dv, dlog_gamma, dbeta, dlam.sum(0), dH_0.mul_(-0.5), dG_0


_backward = library.custom_op("mesatron::mesa_backward", _launch_backward, mutates_args=())


@_backward.register_fake
def _(e, dH, dG, k, v, log_gamma, beta, lam, H_0, G_0, *_):
    gates = (x.new_empty(x.shape, dtype=torch.float32) for x in (beta, beta, lam))
    states = (lam.new_empty(0 if x is None else x.shape, dtype=torch.float32) for x in (H_0, G_0))
    return *(v.new_empty(x.shape) for x in (k, k, v)), *gates, *states


def _setup_context(ctx: Any, inputs: tuple, output: _Twelve) -> None:
    _, *needed, ctx.max_steps, ctx.tolerance = inputs
    ctx.save_for_backward(*needed, *output[5:])
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)


def _gradient(
    ctx: Any, e: Tensor | None, dH: Tensor | None, dG: Tensor | None, *_: None, backward: Callable = _backward
) -> tuple:
    saved = ctx.saved_tensors
    e = torch.zeros_like(saved[1]) if e is None else e
    *inputs, dH_0, dG_0 = backward(e, dH, dG, *saved, ctx.max_steps, ctx.tolerance)
    start = (None, None) if saved[5] is None else (dH_0, dG_0)
    return *inputs, *start, None, None, None


_forward.register_autograd(_gradient, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same without torch's wrapper of custom operators, which only compiled code needs: its autograd took Python
    0.3 ms a forward pass."""

    forward = staticmethod(_launch_forward)
    setup_context = staticmethod(_setup_context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        return _gradient(ctx, *cotangents, backward=_launch_backward)


def _parts(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> list[Part]:
    """Cut the batch into as many rows as the scans of H and G fill the GPU with, which then take no longer than they
    would over all rows at once. Documents are one part.
    """
    if cu_seqlens is not None:
        return [Part(slice(None), slice(None), _layout(k, v, cu_seqlens))]
    batch, heads, parts = k.shape[0], k.shape[2], []
    # 8 warps that hold a state each fill a multiprocessor.
    at_once = max(1, _processors(k) * 8 // _wide(k, v)["num_warps"] // (2 * heads))
    for first in range(0, batch, at_once):
        rows = slice(first, min(first + at_once, batch))
        layout = _layout(k[rows], v[rows], None)
        chunks = slice(rows.start * layout.per_sequence, rows.stop * layout.per_sequence)
        parts.append(Part(rows, chunks, layout))
    return parts


def _sequences(k: Tensor, cu_seqlens: Tensor | None) -> int:
    return k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1


def _layout(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Layout:
    """Cut the rows, or the documents in one row, into chunks."""
    batch, length, L = v.shape[0], v.shape[1], _chunk_length(k, v)
    if cu_seqlens is not None:
        return documents_of(cu_seqlens).made(
            (L, k.shape[2], k.device), lambda bounds: _layout_of_documents(bounds, L, k)
        )
    per_sequence = -(-length // L)
    whole = Layout(None, None, None, length, per_sequence, batch * per_sequence, batch, None)
    piece = _piece_length(whole.chunk_count, per_sequence, k)
    if piece is None:
        return whole
    bounds, pieces = torch.arange(batch + 1, device=k.device) * length, batch * -(-per_sequence // piece)
    return _in_pieces(whole, bounds, piece, L, pieces)


def _layout_of_documents(bounds: Tensor, L: int, k: Tensor) -> Layout:
    """Made on the host, where `bounds` is, for the device of k."""
    counts = (bounds.diff() + L - 1) // L
    owner = torch.repeat_interleave(counts)
    first_chunk = pad(counts.cumsum(0), (1, 0))
    begin = bounds[owner] + (torch.arange(len(owner)) - first_chunk[owner]) * L
    chunks = torch.stack([begin, torch.minimum(begin + L, bounds[owner + 1])], 1).int()
    layout = Layout(chunks, bounds.int(), first_chunk.int(), k.shape[1], 0, len(chunks), len(counts), None)
    piece = _piece_length(layout.chunk_count, int(counts.max()), k)
    if piece is not None:
        layout = _in_pieces(layout, bounds, piece, L, None)
    tables: dict[str, Any] = {name: sent(x, k.device) for name, x in layout._asdict().items() if isinstance(x, Tensor)}
    return layout._replace(**tables)


def _piece_length(chunks: int, longest: int, k: Tensor) -> int | None:
    """Chunks of a piece if the longest sequence, of so many of all chunks, is to be scanned in pieces.

    Pieces are scanned twice, first for what each adds to a state and then from the state that enters it, so they pay
    where one sequence has several times its part of a GPU's work.
    """
    fair = max(SHORTEST_PIECE, -(-chunks * k.shape[2] // _processors(k)))
    return fair if longest > 4 * fair else None


def _in_pieces(layout: Layout, bounds: Tensor, piece: int, L: int, number: int | None) -> Layout:
    """Cut the scan's sequences, with `bounds`, into pieces of up to `piece` chunks, `number` in all.

    None for a number that `bounds` tells; where that is on a GPU, the host has to wait for it.
    """
    counts = (bounds.diff() + L - 1) // L
    pieces = ((counts + piece - 1) // piece).clamp(min=1)  # an empty one keeps its state
    owner = torch.repeat_interleave(pieces, output_size=number)
    first_piece = pad(pieces.cumsum(0), (1, 0))
    ahead = (torch.arange(len(owner), device=bounds.device) - first_piece[owner]) * piece
    first_chunk = pad(counts.cumsum(0), (1, 0))
    sequences = torch.cat([bounds[owner] + ahead * L, bounds[-1:]])
    chunks = torch.cat([first_chunk[owner] + ahead, first_chunk[-1:]])
    return layout._replace(
        sequences=sequences.int(), first_chunk=chunks.int(), scan_count=len(owner), first_piece=first_piece.int()
    )


def _processors(k: Tensor) -> int:
    """Multiprocessors of the GPU; few under the interpreter, so that short sequences come in pieces there."""
    return 16 if INTERPRETED.value else torch.cuda.get_device_properties(k.device).multi_processor_count


def _states(
    k: Tensor, v: Tensor, beta: Tensor, summed: Tensor, norms: Tensor, largest_k: Tensor, largest_v: Tensor,
    lam: Tensor, initial: _Pair, last: _Pair, layout: Layout,
) -> tuple[States, States, Tensor, _Pair, Tensor | None]:  # fmt: skip
    """H and G before every chunk, which chunks are hard, H and G after every sequence or piece of one, and the decay
    over each piece.

    initial: H and G before every sequence. last: room for H and G after it, if they are wanted; pieces get their own.
    """
    heads = k.shape[2]
    hard = torch.empty(layout.chunk_count, heads, dtype=torch.int32, device=k.device)

    def empty(w: Tensor) -> States:
        places = layout.chunk_count + 1  # after the last chunk there is a cotangent
        high = k.new_empty(places, heads, w.shape[-1], k.shape[-1], dtype=_state_type(k))
        return States(high, _low_like(high), beta.new_empty(places, heads))

    H, G = empty(k), empty(v)

    def scan(initial: _Pair, last: _Pair, decay: Tensor | None) -> None:
        triton_states.forward_states[(layout.scan_count, heads, 2)](
            k, v, beta, summed, norms, largest_k, largest_v, lam, *initial, *H, *G, hard, *last, decay, *layout[1:5],
            heads, HARDNESS, **_shape(k, v), **_wide(k, v),
        )  # fmt: skip

    initial = tuple(None if x is None else x.float().contiguous() for x in initial)
    if layout.first_piece is None:
        scan(initial, last, None)
        return H, G, hard, last, None
    decay = beta.new_empty(layout.scan_count, heads)
    last = tuple(beta.new_empty(layout.scan_count, heads, w.shape[-1], k.shape[-1]) for w in (k, v))
    scan((None, None), last, decay)
    scan(_entering(last, decay, initial, layout.first_piece, backward=False), last, None)
    return H, G, hard, last, decay


def _entering(added: _Pair, decay: Tensor, outer: _Pair, first_piece: Tensor, *, backward: bool) -> _Pair:
    """H and G, or their cotangents, that enter each piece; see `triton_states.combine`."""

    def combine(added: Tensor, outer: Tensor | None) -> Tensor:
        _, heads, height, width = added.shape
        result, size, block = torch.empty_like(added), height * width, 1024
        triton_states.combine[(len(first_piece) - 1, heads, -(-size // block))](
            added, decay, outer, result, first_piece, heads, size, BACKWARD=backward, BLOCK=block
        )
        return result

    return tuple(combine(*pair) for pair in zip(added, outer, strict=True))


def _cut(tensors: Iterable[Tensor | None], rows: slice) -> tuple:
    return tuple(None if x is None else x[rows] for x in tensors)


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


def _wide(k: Tensor, v: Tensor) -> dict[str, int]:
    """Launch arguments of kernels that hold whole states or rows: 64 columns a group of 4 warps."""
    return {"num_warps": 8 if max(k.shape[-1], v.shape[-1]) > 64 else 4, "num_stages": 1}


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
