"""The Triton kernels against the exact solve in float64 on the same rounded inputs, forward and every gradient.

On a GPU as they are; elsewhere through Triton's interpreter, which rounds bfloat16 towards zero: its errors are twice
those of a GPU.
"""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from mesatron_kernels import MesaState, mesa, triton_chunkwise
from mesatron_kernels.bench import Clock
from torch import library
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="70,000 documents take the interpreter too long")
NAMES = ("q", "k", "v", "log_gamma", "beta", "lam", "H_0", "G_0")
# Largest norm of an error over the norm of the exact value.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
TF32X3_TOLERANCE = 2e-4


def make_inputs(shape, *, seed=0, gate=4.0, lam=0.25, keys="silu", dtype=torch.float32, sequences=None):
    """q, k, v, log_gamma, beta, lam of `shape` (B, T, heads, D, E), and states of `sequences` if given."""
    B, T, heads, D, E = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator)

    q, k = (F.normalize(F.silu(normal(B, T, heads, D)), dim=-1) for _ in range(2))
    if keys == "identical":
        k = F.normalize(normal(1, 1, heads, D), dim=-1).expand(B, T, heads, D)
    if keys == "slow":
        k = F.normalize(normal(B, 1, heads, D) + 0.1 * normal(B, T, heads, D).cumsum(1), dim=-1)
    gates = normal(B, T, heads)
    log_gamma = torch.full_like(gates, gate) if gate <= 0 else F.logsigmoid(gates + gate)
    rest = [log_gamma, torch.sigmoid(normal(B, T, heads)), lam + torch.rand(heads, D, generator=generator)]
    if sequences:
        root = normal(sequences, heads, D, D)
        rest += [root @ root.mT / D, normal(sequences, heads, E, D)]
    half = [x.to(DEVICE, dtype) for x in (q, k, normal(B, T, heads, E))]
    return half + [x.to(DEVICE) for x in rest]


def run(implementation, inputs, cotangents, cu_seqlens, **solver):
    """o, both final states and every gradient, by name, in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    state = MesaState(*leaves[6:]) if len(leaves) > 6 else None
    options = {"initial_state": state, "cu_seqlens": cu_seqlens, "implementation": implementation} | solver
    result = mesa(*leaves[:6], **options)
    outputs = [result.o, result.state.H, result.state.G]
    gradients = torch.autograd.grad(outputs, leaves, [c.to(o) for c, o in zip(cotangents, outputs, strict=True)])
    named = dict(zip(("o", "H", "G"), outputs, strict=True)) | {
        f"d{n}": g for n, g in zip(NAMES, gradients, strict=False)
    }
    if "dH_0" in named:  # a symmetric matrix moves only along symmetric ones
        named["dH_0"] = (named["dH_0"] + named["dH_0"].mT) / 2
    return {name: value.detach().double() for name, value in named.items()}


def check(inputs, *, cu=None, scale=1.0, tolerance=None, max_steps=60, residual=1e-7):
    """Compare triton with the reference for cotangents times `scale`."""
    q, v = inputs[0], inputs[2]
    cu_seqlens = None if cu is None else torch.tensor(cu, device=DEVICE, dtype=torch.int32)
    sequences = q.shape[0] if cu is None else len(cu) - 1
    heads, D, E = q.shape[2], q.shape[3], v.shape[3]
    generator = torch.Generator(DEVICE).manual_seed(1)
    shapes = (v.shape, (sequences, heads, D, D), (sequences, heads, E, D))
    cotangents = [torch.randn(s, generator=generator, device=DEVICE).to(v.dtype) * scale for s in shapes]
    found = run("triton", inputs, cotangents, cu_seqlens, max_steps=max_steps, tolerance=residual)
    exact = run("reference", [x.double() for x in inputs], [c.double() for c in cotangents], cu_seqlens)
    limit = tolerance or TOLERANCE[q.dtype]
    if q.dtype == torch.float32 and DEVICE == "cuda":
        limit = TF32X3_TOLERANCE
    for name, value in exact.items():
        error = (found[name] - value).norm() / value.norm().clamp_min(1e-300)
        assert error <= limit, f"{name}: {error:.1e} > {limit:.1e}"


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 70, 2, 32, 16), {"sequences": 2}),
        ((1, 1, 1, 16, 16), {"sequences": 1}),
        ((1, 129, 1, 48, 80), {"gate": 0.0, "sequences": 1}),
        ((1, 65, 2, 16, 16), {"gate": -3.0, "lam": 1.0}),
        ((1, 100, 1, 16, 32), {"gate": -1e4}),
        ((1, 200, 1, 16, 16), {"keys": "slow", "gate": -0.001}),
    ],
    ids=["states", "one token", "no forgetting, odd heads", "fast forgetting", "forgets all", "slow keys"],
)
def test_every_gradient_equals_the_exact_solve(shape, options):
    check(make_inputs(shape, **options))


def test_packed_documents_with_states():
    """Empty, one-token and odd documents, each with a state of its own."""
    check(make_inputs((1, 130, 1, 16, 16), sequences=6, gate=1.0), cu=[0, 3, 3, 70, 71, 129, 130])


@pytest.mark.parametrize(
    ("dtype", "options", "documents"),
    [
        (torch.float32, {}, False),
        (torch.float32, {}, True),
        (torch.bfloat16, {"keys": "identical", "gate": -0.001}, True),
    ],
    ids=["rows", "documents", "16 bits, identical keys"],
)
def test_long_sequences_are_scanned_in_pieces(dtype, options, documents):
    """With states at both ends, and empty and short documents beside the long one."""
    length = 340 if DEVICE == "cpu" else 20_000
    cu = [0, 0, 5, length - 20, length - 20, length] if documents else None
    shape = (1 if documents else 2, length, 1, 16, 32)
    inputs = make_inputs(shape, dtype=dtype, sequences=5 if documents else 2, **options)
    bounds = None if cu is None else torch.tensor(cu, device=DEVICE)
    assert triton_chunkwise._layout(inputs[1], inputs[2], bounds).first_piece is not None
    check(inputs, cu=cu, residual=1e-7 if dtype == torch.float32 else 1e-5, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {"sequences": 3}), (torch.bfloat16, {"keys": "identical", "gate": -0.001})],
    ids=["states", "16 bits, identical keys"],
)
def test_a_batch_is_worked_through_in_parts(dtype, options, monkeypatch):
    """The last one smaller."""
    monkeypatch.setattr(triton_chunkwise, "_processors", lambda _: 2)
    inputs = make_inputs((3, 70, 1, 16, 32), dtype=dtype, **options)
    parts = triton_chunkwise._parts(inputs[1], inputs[2], None)
    assert [part.rows for part in parts] == [slice(0, 2), slice(2, 3)]
    check(inputs, residual=1e-7 if dtype == torch.float32 else 1e-5, tolerance=TOLERANCE[dtype])


def allocated_bytes(run):
    """Memory that a call takes at most beside what is there before."""
    if DEVICE == "cuda":
        return Clock(torch.device(DEVICE)).peak_mib(run) * 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda x: x.start_ns())
    return max(accumulate(x.nbytes() for x in events if x.name() == "[memory]"))


def test_states_of_one_part_are_held_at_a_time(monkeypatch):
    """Beside states: forward o, two terms of q* and keys of both parts at most; backward two terms of e*, dv, keys of
    one part. dq, dk and the cotangents of states take no room of their own.
    """
    monkeypatch.setattr(triton_chunkwise, "_processors", lambda _: 4)
    inputs = [x.requires_grad_() for x in make_inputs((4, 128, 1, 128, 128), dtype=torch.bfloat16)]
    parts = triton_chunkwise._parts(inputs[1], inputs[2], None)
    assert len(parts) == 2
    cotangent, results = torch.ones_like(inputs[2]), []
    forward = allocated_bytes(lambda: results.append(call(inputs)))
    call([x[:, :1] if x.ndim > 2 else x for x in inputs])  # the interpreter keeps what its last launch had
    backward = allocated_bytes(lambda: results.append(torch.autograd.grad(results[0], inputs, cotangent)))
    unit = inputs[0].numel() * 2
    states = 4 * (parts[0].layout.chunk_count + 1) * 128 * 128 * 2
    final = 2 * 4 * 128 * 128 * 4
    gates = 8 * inputs[4].numel() * 4
    assert forward <= 4 * unit + final + states + gates
    assert backward <= 3.5 * unit + states + gates


@pytest.mark.parametrize("scale", [1e-8, 1e4])
def test_gradients_do_not_depend_on_the_loss_scale(scale):
    check(make_inputs((1, 70, 1, 16, 16)), scale=scale)


def test_zero_queries_give_zero_and_take_no_step():
    inputs = make_inputs((1, 70, 1, 16, 16))
    inputs[0][:, ::2] = 0
    result = mesa(*inputs, implementation="triton")
    assert not result.o[:, ::2].any()
    assert not result.steps[:, ::2].any()
    assert result.steps[:, 1::2].min() >= 1
    assert result.residual.max() <= 1e-4


def test_a_token_stops_by_itself():
    """A hard neighbour in the chunk changes neither the steps nor the bits of an easy token."""
    inputs = make_inputs((1, 64, 1, 16, 16))
    alone = mesa(*inputs, implementation="triton")
    zeroed = [x.clone() for x in inputs]
    zeroed[0][:, 32:] = 0
    fewer = mesa(*zeroed, implementation="triton")
    assert torch.equal(alone.o[:, :32], fewer.o[:, :32])
    assert torch.equal(alone.steps[:, :32], fewer.steps[:, :32])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: [t.double() for t in x], "no float64"),
        (lambda x: [*x[:2], x[2].bfloat16(), *x[3:]], "one dtype"),
        (lambda x: [x[0][..., :8], x[1][..., :8], *x[2:5], x[5][..., :8]], "multiples of 16"),
    ],
)
def test_what_the_kernels_do_not_hold_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        mesa(*change(make_inputs((1, 5, 1, 16, 16))), implementation="triton")


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": 6.0},
        {"gate": 0.85, "lam": 1.0},
        {"keys": "slow", "gate": -0.001},
        {"keys": "identical", "gate": -0.01},
    ],
    ids=["silu", "long memory", "short memory", "slow keys", "identical keys"],
)
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1e-8), (torch.bfloat16, 1.0), (torch.float16, 1.0)])
def test_16_bit_inputs(dtype, head, options, scale):
    """float16 cannot hold a cotangent of 1e-8."""
    shape = (2, 300, 2, head, head) if DEVICE == "cuda" else (1, 150, 1, head, head)
    check(make_inputs(shape, dtype=dtype, **options), scale=scale, residual=1e-5, tolerance=5e-3)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16), (48, 80), (112, 96), (64, 128), (128, 64)], ids=str)
def test_16_bit_heads_of_any_size(sizes):
    check(make_inputs((1, 150, 1, *sizes), dtype=torch.bfloat16), residual=1e-5, tolerance=5e-3)


def test_16_bit_inputs_where_only_some_chunks_are_hard():
    """Documents with states of their own, the first too large for one 16-bit term, values from 1e-4 to 1e4."""
    inputs = make_inputs((1, 200, 1, 32, 16), sequences=3, dtype=torch.bfloat16)
    inputs[2] *= (10 ** torch.linspace(-4, 4, 200, device=DEVICE))[None, :, None, None]
    inputs[6][0] *= 1000
    check(inputs, cu=[0, 10, 100, 200], residual=1e-5, tolerance=5e-3)


@pytest.mark.parametrize("beta", [1e-9, 1e-7, 1.0])
def test_16_bit_inputs_of_any_gate(beta):
    inputs = make_inputs((1, 140, 1, 16, 16), dtype=torch.bfloat16)
    inputs[4] = torch.full_like(inputs[4], beta)
    check(inputs, residual=1e-5, tolerance=5e-3)


@pytest.mark.parametrize("large", ["v", "cotangent"])
def test_what_is_large_in_one_place_spoils_nothing_elsewhere(large):
    """Values a million times larger in the first half that a gate then forgets, or such a cotangent in the last half:
    errors are taken in the other half alone."""
    inputs = make_inputs((1, 256, 1, 16, 16), dtype=torch.bfloat16)
    cotangents = [torch.randn(1, 256, 1, 16, generator=torch.Generator().manual_seed(2)).to(inputs[2])]
    if large == "v":
        inputs[2][:, :128] *= 1e6
        inputs[3][:, 128] = -1e4
        half = slice(128, None)
    else:
        cotangents[0][:, :64] *= 1e6
        half = slice(64, None)
    cotangents += [torch.zeros(1, 1, 16, 16, device=DEVICE)] * 2
    found = run("triton", inputs, cotangents, None, max_steps=60, tolerance=1e-5)
    exact = run("reference", [x.double() for x in inputs], [c.double() for c in cotangents], None)
    for name in ("o", "dq", "dk", "dv", "dbeta"):
        error = (found[name] - exact[name])[:, half].norm() / exact[name][:, half].norm()
        assert error <= 5e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize("index", range(6), ids=["q", "k", "v", "log_gamma", "beta", "lambda"])
def test_what_is_not_a_number_is_seen(index):
    inputs = make_inputs((1, 70, 1, 16, 16))
    inputs[index].view(-1)[3] = float("nan")
    assert mesa(*inputs, implementation="triton").o.isnan().any()


def call(inputs):
    return mesa(*inputs, implementation="triton", return_state=False).o


def call_on_documents(inputs):
    bounds = torch.tensor([0, 3, 70], dtype=torch.int32, device=DEVICE)
    return mesa(*inputs, implementation="triton", return_state=False, cu_seqlens=bounds).o


@pytest.mark.parametrize(
    "wrapped",
    [
        torch.compile(call, backend="aot_eager", fullgraph=True),
        lambda inputs: checkpoint(call, inputs, use_reentrant=False),
        lambda inputs: torch.autocast(DEVICE, torch.bfloat16)(call)(inputs),
    ],
    ids=["torch.compile", "activation checkpointing", "autocast"],
)
def test_works_under(wrapped):
    """The same bits as called plainly."""
    results = []
    for function in (call, wrapped):
        leaves = [x.requires_grad_() for x in make_inputs((1, 70, 1, 16, 16))]
        o = function(leaves)
        results.append([o, *torch.autograd.grad(o.sum(), leaves)])
    assert all(map(torch.equal, *results))


def test_compiles_whole_with_documents():
    compiled = torch.compile(call_on_documents, backend="aot_eager", fullgraph=True)
    inputs = make_inputs((1, 70, 1, 16, 16))
    assert torch.equal(compiled(inputs), call_on_documents(inputs))


@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 70]], ids=["rows", "documents"])
def test_operators_are_registered_as_torch_wants_them(cu_seqlens):
    """float32: of the low terms that 16-bit inputs have, only those of hard chunks are ever written."""
    inputs = [x.requires_grad_() for x in make_inputs((1, 70, 1, 16, 16))]
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    arguments = (*inputs, None, None, bounds, 30, 1e-4)
    library.opcheck(triton_chunkwise._forward, arguments)
    swapped = [x.mT.contiguous().mT if x.ndim == 4 else x.double() for x in (y.detach() for y in inputs)]
    library.opcheck(triton_chunkwise._forward, (*swapped, None, None, bounds, 30, 1e-4))


@on_gpu
def test_many_chunks_and_documents():
    """Deterministic, and more programs than a grid's second axis holds."""
    inputs = make_inputs((1, 70_000, 1, 16, 16), dtype=torch.bfloat16)
    cu_seqlens = torch.arange(70_001, device=DEVICE, dtype=torch.int32)
    first, second = (mesa(*inputs, cu_seqlens=cu_seqlens, implementation="triton").o for _ in range(2))
    assert torch.equal(first, second)
    one = mesa(*(x[:, -1:] for x in inputs[:5]), inputs[5], implementation="triton").o
    torch.testing.assert_close(first[:, -1:], one)
