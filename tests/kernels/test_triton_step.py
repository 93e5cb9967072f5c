"""The decode-step kernel against the exact step in float64 on the same rounded inputs, against the torch step where the
solver's own course is at stake, and after a prefill against the whole sequence at once.

On a GPU as it is; elsewhere through Triton's interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from mesatron_kernels import MesaOutput, MesaState, chunkwise, mesa, reference, triton_step
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOLVER = {"max_steps": 200, "tolerance": 1e-6}
# Largest norm of an error over the norm of the exact value.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def make_inputs(
    batch: int, heads: int, key_size: int, value_size: int, *, dtype: torch.dtype = torch.float32, keys: str = "silu"
) -> tuple[list[Tensor], MesaState]:
    """q, k, v, log_gamma, beta, lam and the state after 300 keys of the kind with a slow decay."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q = F.normalize(F.silu(normal(batch, heads, key_size)), dim=-1)
    seen = F.normalize(F.silu(normal(300, batch, heads, key_size)), dim=-1)
    if keys == "identical":
        seen = seen[:1].expand(300, -1, -1, -1)
    decayed = seen * (0.997 ** torch.arange(300.0))[:, None, None, None]
    H = torch.einsum("tbhi,tbhj->bhij", decayed, seen)
    state = MesaState(
        (H + H.mT) / 2,  # exactly symmetric, as every H
        torch.einsum("tbhi,tbhj->bhij", normal(300, batch, heads, value_size), decayed),
    )
    half = [x.to(DEVICE, dtype) for x in (q, seen[-1], normal(batch, heads, value_size))]
    gates = [F.logsigmoid(normal(batch, heads) + 4), torch.sigmoid(normal(batch, heads))]
    rest = [x.to(DEVICE) for x in (*gates, 0.25 + torch.rand(heads, key_size, generator=generator))]
    return half + rest, MesaState(*(x.to(DEVICE) for x in state))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def check(inputs: list[Tensor], state: MesaState, tolerance: float | None = None) -> MesaOutput:
    """The step beside the exact one: output and new states; the old state untouched."""
    before = [x.clone() for x in state]
    found = triton_step.mesa_step(*inputs, state, **SOLVER)
    exact = reference.mesa_step(*(x.double() for x in inputs), MesaState(*(x.double() for x in state)), **SOLVER)
    assert found.o.dtype == inputs[2].dtype
    assert error(found.o, exact.o) <= (tolerance or TOLERANCE[inputs[2].dtype])
    for new, wanted in zip(found.state, exact.state, strict=True):
        assert error(new, wanted) <= 1e-6
    assert torch.equal(found.state.H, found.state.H.mT)
    assert found.residual.max() <= SOLVER["tolerance"]
    assert all(map(torch.equal, before, state))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(1, 2, 16, 16), (5, 3, 48, 80), (5, 1, 64, 128), (2, 1, 128, 32), (1, 2, 128, 128)], ids=str
)
def test_a_step_equals_the_exact_solve(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check(*make_inputs(*shape, dtype=dtype))


def test_identical_keys_of_a_long_past() -> None:
    inputs, state = make_inputs(2, 1, 64, 64, keys="identical")
    check(inputs, state, tolerance=5e-4)  # condition number about 900


def test_large_values_and_queries_of_any_scale() -> None:
    inputs, state = make_inputs(4, 1, 48, 48)
    inputs[0] *= torch.tensor([1e-30, 1e-8, 1.0, 1e4], device=DEVICE)[:, None, None]
    inputs[2] *= 1e4
    found = check(inputs, MesaState(state.H, state.G * 1e4))
    size = inputs[0].double().norm(dim=-1, keepdim=True)
    unit = [inputs[0].double() / size, *(x.double() for x in inputs[1:])]
    exact = reference.mesa_step(*unit, MesaState(state.H, state.G * 1e4), **SOLVER)
    for row in range(4):
        assert error(found.o[row] / size[row], exact.o[row]) <= 2e-5


def test_a_gate_of_zero_forgets_everything() -> None:
    inputs, state = make_inputs(2, 2, 16, 32)
    inputs[3].fill_(float("-inf"))
    inputs[4].fill_(0.5)
    key, value = inputs[1], inputs[2]
    found = check(inputs, state)
    torch.testing.assert_close(found.state.H, 0.5 * key[..., :, None] * key[..., None, :])
    torch.testing.assert_close(found.state.G, 0.5 * value[..., :, None] * key[..., None, :])


def test_zero_queries_give_zero_and_take_no_step() -> None:
    inputs, state = make_inputs(3, 1, 16, 16)
    inputs[0][1] = 0
    found = check(inputs, state)
    assert not found.o[1].any()
    assert not found.steps[1].any()
    assert found.steps[::2].min() >= 1


@pytest.mark.parametrize("keys", ["silu", "identical"])
def test_the_solver_goes_the_torch_step_s_way(keys: str) -> None:
    """Same start, from zero with identical keys, and same steps. Later steps differ as rounding does."""
    inputs, state = make_inputs(5, 2, 48, 48, keys=keys)
    for max_steps in (0, 1, 2):
        found = triton_step.mesa_step(*inputs, state, max_steps=max_steps, tolerance=0.0)
        twin = chunkwise.mesa_step(*inputs, state, max_steps=max_steps, tolerance=0.0)
        assert (found.steps == max_steps).all()
        torch.testing.assert_close(found.residual, twin.residual, rtol=1e-4, atol=0)
        torch.testing.assert_close(found.o, twin.o, rtol=1e-4, atol=1e-4)
    found = triton_step.mesa_step(*inputs, state, max_steps=50, tolerance=1e-3)
    twin = chunkwise.mesa_step(*inputs, state, max_steps=50, tolerance=1e-3)
    assert (found.steps - twin.steps).abs().max() <= 1
    assert found.residual.max() <= 1e-3


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    inputs, state = make_inputs(5, 2, 32, 32)
    together = triton_step.mesa_step(*inputs, state, max_steps=30, tolerance=1e-3)
    last = [x[4:] for x in inputs[:5]]
    alone = triton_step.mesa_step(*last, inputs[5], MesaState(*(x[4:] for x in state)), max_steps=30, tolerance=1e-3)
    assert torch.equal(together.o[4:], alone.o)
    assert torch.equal(together.steps[4:], alone.steps)


@pytest.mark.parametrize("prefill", ["torch", "triton"])
def test_steps_go_on_from_a_prefill(prefill: str) -> None:
    """70 tokens at once and 4 one by one, beside all 74 exactly."""
    lam = make_inputs(2, 2, 16, 32)[0][5]
    generator = torch.Generator().manual_seed(1)
    q, k = (F.normalize(torch.randn(2, 74, 2, 16, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(2, 74, 2, 32, generator=generator)
    log_gamma = F.logsigmoid(torch.randn(2, 74, 2, generator=generator) + 4)
    beta = torch.sigmoid(torch.randn(2, 74, 2, generator=generator))
    tokens = [x.to(DEVICE) for x in (q, k, v, log_gamma, beta)]
    first = mesa(*(x[:, :70] for x in tokens), lam, implementation=prefill, **SOLVER)
    outputs, state = [], first.state
    assert state is not None
    for t in range(70, 74):
        result = triton_step.mesa_step(*(x[:, t] for x in tokens), lam, state, **SOLVER)
        outputs.append(result.o)
        state = result.state
    whole = mesa(*(x.double() for x in tokens), lam.double(), implementation="reference")
    assert error(torch.stack(outputs, 1), whole.o[:, 70:]) <= 2e-4
    assert whole.state is not None
    for found, exact in zip(state, whole.state, strict=True):
        assert error(found, exact) <= 2e-4


def test_what_the_kernel_does_not_hold_is_refused() -> None:
    inputs, state = make_inputs(1, 1, 16, 16)
    with pytest.raises(ValueError, match="no float64"):
        triton_step.mesa_step(*(x.double() for x in inputs), state, **SOLVER)
    for size in (24, 144):
        inputs, state = make_inputs(1, 1, size, 16)
        with pytest.raises(ValueError, match=f"multiples of 16 up to 128, but D is {size}"):
            triton_step.mesa_step(*inputs, state, **SOLVER)
