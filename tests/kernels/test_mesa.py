"""The Mesa operator.

The float64 reference is checked against the regression problem of the paper, the torch implementation against the
reference, against finite differences, and against itself where two ways of asking must give one answer (documents
packed or alone, a sequence whole or in two parts, a token at a time or all at once, one batch or another).
"""

from __future__ import annotations

from itertools import pairwise

import mesatron_kernels
import pytest
import torch
import torch.nn.functional as F
from mesatron_kernels import MesaState, mesa, mesa_step
from torch import Tensor

Named = dict[str, Tensor]

# Largest relative error (norm of the difference over norm of the expected) by what is compared.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 6e-3, "same in float32": 2e-6}
# Solver settings under which two ways of asking must agree to rounding.
EXACT = {torch.float64: {"tolerance": 1e-13, "max_steps": 100}, torch.float32: {"tolerance": 1e-7, "max_steps": 100}}
BOUNDS = [0, 0, 1, 3, 40, 40, 41, 105, 130, 130]


def make_inputs(
    batch: int,
    length: int,
    heads: int = 2,
    key_size: int = 6,
    value_size: int = 5,
    *,
    dtype: torch.dtype = torch.float64,
    sequences: int | None = None,
    seed: int = 0,
) -> Named:
    """Arguments by name; keys and queries of norm 1; H and G are the initial states of as many sequences."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    sequences = batch if sequences is None else sequences
    root = normal(sequences, heads, key_size, key_size)
    inputs = {
        "q": F.normalize(F.silu(normal(batch, length, heads, key_size)), dim=-1),
        "k": F.normalize(F.silu(normal(batch, length, heads, key_size)), dim=-1),
        "v": normal(batch, length, heads, value_size),
        "log_gamma": F.logsigmoid(normal(batch, length, heads) + 2),
        "beta": torch.sigmoid(normal(batch, length, heads)),
        "lam": 0.25 + F.softplus(normal(heads, key_size)),
        "H": root @ root.mT / key_size,
        "G": normal(sequences, heads, value_size, key_size),
    }
    return {name: x.to(dtype) for name, x in inputs.items()}


def without_states(inputs: Named) -> Named:
    return {name: x for name, x in inputs.items() if name not in "HG"}


def forward(inputs: Named, **options: object) -> mesatron_kernels.MesaOutput:
    """The operator on named inputs; H and G, if there, are the initial state."""
    state = MesaState(inputs["H"], inputs["G"]) if "H" in inputs else None
    return mesa(**without_states(inputs), initial_state=state, **options)  # type: ignore[arg-type]


def cotangents_like(o: Tensor, state: MesaState | None = None) -> Named:
    generator = torch.Generator().manual_seed(1)
    outputs = {"o": o} | ({} if state is None else {"H_T": state.H, "G_T": state.G})
    return {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for name, x in outputs.items()
    }


def run(inputs: Named, cotangents: Named | None = None, **options: object) -> Named:
    """Outputs and gradients by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out = forward(leaves, **options)
    outputs = {"o": out.o} | ({} if out.state is None else {"H_T": out.state.H, "G_T": out.state.G})
    cotangents = cotangents or cotangents_like(out.o, out.state)
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), [cotangents[name] for name in outputs])
    named_grads = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: x.detach() for name, x in outputs.items()} | named_grads


def error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    # What is zero but for rounding, such as the gradient of a gate with nothing before it, is measured absolutely.
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-3)).item()


def assert_close(actual: Named, expected: Named, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: error(actual[name], expected[name]) for name in expected}
    # A NaN must fail, so the comparison is not turned round.
    assert all(e <= tolerance for e in errors.values()), str(errors)


def test_reference_solves_the_papers_regression() -> None:
    """Phi_t minimises sum_i zeta_(t,i) beta_i |v_i - Phi k_i|^2 + Tr(Phi Lambda Phi^T) (section 2): least squares."""
    inputs = without_states(make_inputs(1, 9, heads=1))
    q, k, v, log_gamma, beta = (inputs[name][0, :, 0] for name in ("q", "k", "v", "log_gamma", "beta"))
    expected = []
    for t in range(9):
        zeta = torch.stack([log_gamma[i + 1 : t + 1].sum().exp() for i in range(t + 1)])
        root = (zeta * beta[: t + 1]).sqrt()[:, None]
        left = torch.cat([root * k[: t + 1], inputs["lam"][0].sqrt().diag()])
        right = torch.cat([root * v[: t + 1], v.new_zeros(6, 5)])
        expected.append(q[t] @ torch.linalg.lstsq(left, right).solution)
    actual = forward(inputs, implementation="reference").o[0, :, 0]
    assert error(actual, torch.stack(expected)) < TOLERANCES["float64"]


@pytest.mark.parametrize(("bounds", "with_states"), [(None, True), ([0, 2, 2, 6, 7], True), ([0, 2, 2, 6, 7], False)])
def test_gradients_are_finite_differences(bounds: list[int] | None, with_states: bool) -> None:
    """Every input, both initial states, from the output and both final states."""
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    sequences = 2 if bounds is None else len(bounds) - 1
    inputs = make_inputs(2 if bounds is None else 1, 7, key_size=3, value_size=2, sequences=sequences)
    inputs = inputs if with_states else without_states(inputs)

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(inputs, values, strict=True))
        if with_states:
            named["H"] = (named["H"] + named["H"].mT) / 2
        out = forward(named, cu_seqlens=cu_seqlens, chunk_size=3, return_state=with_states, **EXACT[torch.float64])
        return (out.o,) if out.state is None else (out.o, *out.state)

    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in inputs.values()])


def _edge_case(name: str) -> Named:
    """float32 inputs in which one thing is extreme."""
    match name:
        case "one token":
            return make_inputs(2, 1, dtype=torch.float32)
        case "identical keys":
            inputs = make_inputs(1, 2000, heads=1, key_size=16, value_size=4, dtype=torch.float32)
            inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
            inputs["log_gamma"].zero_()
            return without_states(inputs)
    inputs = make_inputs(2, 75, dtype=torch.float32)
    uniform = torch.rand(2, 75, 2, generator=torch.Generator().manual_seed(2))
    match name:
        case "gamma one":
            inputs["log_gamma"].zero_()
        case "gamma near zero":
            inputs["log_gamma"] = -5 - 20 * uniform
        case "gamma zero":
            inputs["log_gamma"].fill_(-torch.inf)
        case "gamma zero here and there":
            # Neighbours of huge sums keep their own decay: -1e30 must not swallow it, nor inf - inf make it NaN.
            for limit, value in ((0.3, -torch.inf), (0.2, -1e30), (0.1, -700.0)):
                inputs["log_gamma"].masked_fill_(uniform < limit, value)
        case "beta zero":
            inputs["beta"].zero_()
        case "beta zero here and there":
            inputs["beta"].masked_fill_(uniform < 0.5, 0)
        case "large values":
            inputs["v"] *= 1e4
        case "zero queries":
            inputs["q"].masked_fill_(uniform[..., None] < 0.5, 0)
        case _:
            assert name == "ordinary"
    return inputs


EDGE_CASES = ["ordinary", "one token", "gamma one", "gamma near zero", "gamma zero", "gamma zero here and there"]
EDGE_CASES += ["beta zero", "beta zero here and there", "identical keys", "large values", "zero queries"]


@pytest.mark.parametrize("case", EDGE_CASES)
def test_equals_the_exact_solve(case: str) -> None:
    """float32 against float64, outputs and gradients, whatever the chunk size."""
    inputs = _edge_case(case)
    expected = run(inputs, implementation="reference")
    for chunk_size in (64,) if case == "identical keys" else (1, 7, 64, 1000):
        actual = run(inputs, chunk_size=chunk_size, implementation="torch", **EXACT[torch.float32])
        assert_close(actual, expected, TOLERANCES["float32"])


def test_zero_queries_give_exactly_zero() -> None:
    inputs = make_inputs(1, 5)
    inputs["q"].zero_()
    out = forward(inputs)
    assert not out.o.any()
    assert not out.steps.any()
    assert not out.residual.any()


def test_a_long_sequence_passes_states_on() -> None:
    """More chunks than the state scan takes at a time."""
    inputs = make_inputs(1, 150, heads=1)
    inputs["log_gamma"] *= 0.01
    actual = run(inputs, chunk_size=1, **EXACT[torch.float64])
    assert_close(actual, run(inputs, implementation="reference"), TOLERANCES["float64"])


def test_half_precision_inputs() -> None:
    """bfloat16 q, k, v against the reference on the same rounded values; states are float32 and as exact as ever."""
    inputs = make_inputs(2, 75, dtype=torch.float32)
    inputs |= {name: inputs[name].bfloat16() for name in "qkv"}
    actual, expected = run(inputs, **EXACT[torch.float32]), run(inputs, implementation="reference")
    assert {name: x.dtype for name, x in actual.items()} == {name: x.dtype for name, x in expected.items()}
    assert_close(actual, expected, TOLERANCES["bfloat16"])
    exact = ["H_T", "G_T", "dlam", "dlog_gamma", "dbeta", "dH", "dG"]
    assert_close({n: actual[n] for n in exact}, {n: expected[n] for n in exact}, TOLERANCES["float32"])


def test_reduced_precision_settings_do_not_reach_the_solve() -> None:
    """Autocast and low-precision float32 products, both set by the user, change nothing and are left as they were."""
    inputs = make_inputs(1, 130, key_size=32, value_size=32, dtype=torch.float32)
    expected = run(inputs)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            actual = run(inputs)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e4, 1e8])
def test_gradients_do_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    inputs = make_inputs(2, 75, key_size=32, value_size=32, dtype=torch.float32)
    out = forward(inputs)
    cotangents = cotangents_like(out.o, out.state)
    expected = run(inputs, cotangents)
    actual = run(inputs, {name: x * scale for name, x in cotangents.items()})
    actual = {name: x / scale if name not in cotangents else x for name, x in actual.items()}
    assert_close(actual, expected, TOLERANCES["same in float32"])


@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_token_by_token_equals_the_whole_sequence(implementation: str) -> None:
    """Fixed steps, so that the stop rule cannot hide a difference."""
    inputs = make_inputs(2, 70, key_size=12)
    options = {"max_steps": 8, "tolerance": 0.0, "implementation": implementation}
    whole = forward(inputs, chunk_size=16, **options)
    state = MesaState(inputs["H"], inputs["G"])
    tokens = []
    for t in range(70):
        at_t = (inputs[name][:, t] for name in ("q", "k", "v", "log_gamma", "beta"))
        out = mesa_step(*at_t, inputs["lam"], state, **options)  # type: ignore[arg-type]
        state = out.state
        tokens.append(out)
        assert torch.equal(out.steps, whole.steps[:, t])
    assert error(torch.stack([out.o for out in tokens], 1), whole.o) < TOLERANCES["float64"]
    residual = torch.stack([out.residual for out in tokens], 1)
    torch.testing.assert_close(residual, whole.residual, rtol=1e-6, atol=1e-10)
    for actual, expected in zip(state, whole.state, strict=True):
        assert error(actual, expected) < TOLERANCES["float64"]


@pytest.mark.parametrize("implementation", ["reference", "torch"])
@pytest.mark.parametrize("with_states", [True, False])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_packed_documents_equal_each_alone(implementation: str, with_states: bool, chunk_size: int) -> None:
    """Outputs and gradients, documents of no and of one token among them, with and without states in and out."""
    options = {"chunk_size": chunk_size, "return_state": with_states, "implementation": implementation}
    options |= EXACT[torch.float64]
    inputs = make_inputs(1, BOUNDS[-1], sequences=len(BOUNDS) - 1)
    inputs = inputs if with_states else without_states(inputs)
    packed = run(inputs, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32), **options)
    shapes = forward(inputs, cu_seqlens=torch.tensor(BOUNDS), **options)
    cotangents = cotangents_like(shapes.o, shapes.state)

    dlam = torch.zeros_like(inputs["lam"])
    for document, (begin, end) in enumerate(pairwise(BOUNDS)):

        def part(named: Named, rows: slice = slice(document, document + 1), tokens: slice = slice(begin, end)) -> Named:
            of_states = ("H", "G", "H_T", "G_T", "dH", "dG")
            return {
                name: x if name == "lam" else x[rows] if name in of_states else x[:, tokens]
                for name, x in named.items()
                if name != "dlam"
            }

        if begin == end:
            if with_states:
                same = part(packed)
                assert torch.equal(same["H_T"], part(inputs)["H"])
                assert torch.equal(same["dG"], part(cotangents)["G_T"])
            continue
        alone = run(part(inputs), part(cotangents), **options)
        dlam += alone.pop("dlam")
        assert_close(part(packed), alone, TOLERANCES["float64"])
    assert error(packed["dlam"], dlam) < TOLERANCES["float64"]


@pytest.mark.parametrize("return_state", [True, False])
def test_ten_thousand_documents_of_one_token(return_state: bool) -> None:
    """Against the closed form: o = beta v (k^T Lambda^-1 q) / (1 + beta k^T Lambda^-1 k), by Sherman and Morrison."""
    inputs = without_states(make_inputs(1, 10_000, key_size=16, value_size=16, dtype=torch.float32))
    cu_seqlens = torch.arange(10_001)
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    q, k, v, _, beta, lam = leaves
    k_lam = k / lam
    share = beta * (k_lam * q).sum(-1) / (1 + beta * (k_lam * k).sum(-1))
    cotangent = cotangents_like(v)["o"]
    grads = torch.autograd.grad(share[..., None] * v, leaves, cotangent, allow_unused=True)
    out = forward(inputs, cu_seqlens=cu_seqlens, return_state=return_state)
    assert error(out.o, share[..., None] * v) < TOLERANCES["float32"]
    if return_state:
        assert error(out.state.G, torch.einsum("thv,thk->thvk", v[0], beta[0, ..., None] * k[0])) < 1e-6
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    options = EXACT[torch.float32]
    o = forward(dict(zip(inputs, leaves, strict=True)), cu_seqlens=cu_seqlens, return_state=return_state, **options).o
    actual = dict(zip(inputs, torch.autograd.grad(o, leaves, cotangent), strict=True))
    assert not actual.pop("log_gamma").any()
    expected = {name: grad for name, grad in zip(inputs, grads, strict=True) if grad is not None}
    assert_close(actual, expected, TOLERANCES["float32"])


def test_a_sequence_in_two_parts_equals_the_whole() -> None:
    inputs = make_inputs(2, 50)
    options = {"chunk_size": 8, **EXACT[torch.float64]}
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    per_token = ("q", "k", "v", "log_gamma", "beta")
    first = forward({name: x[:, :23] if name in per_token else x for name, x in leaves.items()}, **options)
    rest = {name: x[:, 23:] if name in per_token else x for name, x in leaves.items()}
    second = forward(rest | {"H": first.state.H, "G": first.state.G}, **options)
    outputs = {"o": torch.cat([first.o, second.o], 1), "H_T": second.state.H, "G_T": second.state.G}
    cotangents = cotangents_like(outputs["o"], second.state)
    grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), list(cotangents.values()))
    parts = outputs | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    assert_close(parts, run(inputs, cotangents, **options), TOLERANCES["float64"])


def test_results_do_not_depend_on_the_rest_of_the_batch() -> None:
    """A hard sequence beside an easy and an empty one, at the training tolerance: same steps, same numbers."""
    inputs = make_inputs(3, 130, key_size=32, value_size=32, dtype=torch.float32)
    inputs["k"][1] = F.normalize(inputs["k"][1, :1] + 0.02 * inputs["k"][1], dim=-1)
    inputs["log_gamma"][1] *= 0.001
    inputs["log_gamma"][0] -= 6
    del inputs["H"], inputs["G"]
    inputs["q"][2] = 0
    together = forward(inputs)
    cotangents = cotangents_like(together.o, together.state)
    gradients = run(inputs, cotangents)
    assert together.steps[1].max() > together.steps[0].max() + 3
    for row in range(3):
        rows = slice(row, row + 1)
        one = {name: x if name == "lam" else x[rows] for name, x in inputs.items()}
        alone = forward(one)
        assert torch.equal(alone.steps, together.steps[rows])
        torch.testing.assert_close(alone.residual, together.residual[rows], rtol=1e-3, atol=1e-7)
        assert (alone.residual <= 1e-4).all()
        expected = run(one, {name: x[rows] for name, x in cotangents.items()})
        del expected["dlam"]
        actual = {name: gradients[name][rows] for name in expected}
        assert_close(actual, expected, TOLERANCES["same in float32"])


def test_solver_report() -> None:
    """Steps and residuals against the true residual in float64, and against runs that were stopped earlier.

    With v = 0 and the identity for G the output is a decayed q*, so the solution itself can be seen.
    """
    tolerance = 1e-3
    inputs = make_inputs(1, 40, heads=1, key_size=16, value_size=16, dtype=torch.float32)
    inputs["v"].zero_()
    inputs["G"] = torch.eye(16).view(1, 1, 16, 16)
    inputs["log_gamma"] *= 0.1
    H, lam = inputs["H"][0, 0].double(), inputs["lam"][0].double().diag()
    systems = []
    for t in range(40):
        k = inputs["k"][0, t, 0].double()
        H = inputs["log_gamma"][0, t, 0].double().exp() * H + inputs["beta"][0, t, 0] * torch.outer(k, k)
        systems.append(H + lam)
    q = inputs["q"][0, :, 0].double()
    decay = inputs["log_gamma"][0, :, 0].double().cumsum(0).exp()

    free = forward(inputs, tolerance=tolerance)
    steps = free.steps.flatten()
    assert len(steps.unique()) > 1
    for max_steps in range(int(steps.max()) + 1):
        out = forward(inputs, tolerance=tolerance, max_steps=max_steps)
        q_star = out.o[0, :, 0].double() / decay[:, None]
        if max_steps == 0:
            start = q / torch.stack([A.diagonal() for A in systems])
            assert error(q_star, start) < 1e-6
        true = (q - torch.einsum("tij,tj->ti", torch.stack(systems), q_star)).norm(dim=1) / q.norm(dim=1)
        torch.testing.assert_close(out.residual.flatten().double(), true, rtol=1e-3, atol=1e-6)
        assert torch.equal(out.steps.flatten(), steps.clamp(max=max_steps))
        assert torch.equal(out.residual.flatten() > tolerance, steps > max_steps)


def test_tolerance_zero_takes_every_step() -> None:
    out = forward(make_inputs(1, 20, key_size=16), tolerance=0.0, max_steps=5)
    assert (out.steps == 5).all()
