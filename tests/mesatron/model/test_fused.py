"""The Triton forms of the functions around a mixer against their torch forms in float64: values and every gradient.

On a GPU in the dtypes that train; elsewhere through Triton's interpreter. Odd sizes, packed documents with empty ones
among them, zero heads, ignored targets; and the whole model in both forms.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model import fused
from mesatron.model.backbone import Backbone
from mesatron.model.convolution import positions_in_documents
from mesatron.model.parameter import initialize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest norm of an error over the norm of the exact value. The interpreter rounds bf16 toward zero.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if DEVICE == "cpu" else 4e-3}
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="16-bit products of the whole model need a GPU")


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def compare(function: Callable[..., Tensor], inputs: list[Tensor], tolerance: float | None = None) -> Tensor:
    """`function(*inputs, implementation)` in both forms, with a cotangent of ones and threes; the Triton result."""
    results = []
    for implementation, dtype in (("torch", torch.float64), ("triton", inputs[0].dtype)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        y = function(*leaves, implementation)
        cotangent = torch.ones_like(y)
        cotangent[..., ::2] = 3
        results.append([y, *torch.autograd.grad(y, leaves, cotangent)])
    for number, (exact, found) in enumerate(zip(*results, strict=True)):
        assert found.shape == exact.shape
        error = (found.double() - exact).norm() / exact.norm()
        assert error <= (tolerance or TOLERANCES[inputs[0].dtype]), f"result {number}: {error:.1e}"
    return results[1][0]


@pytest.mark.parametrize("shape", [(3,), (768,), (3, 20), (2, 128)], ids=str)
@pytest.mark.parametrize("tokens", [1, 131])
def test_rms_norm(shape: tuple[int, ...], tokens: int, dtype: torch.dtype) -> None:
    inputs = [normal(tokens, 1, *shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)]
    y = compare(lambda x, weight, form: fused.rms_norm(x, weight, 1e-3, form), inputs)
    assert y.dtype == dtype


def test_rms_norm_of_a_view(dtype: torch.dtype) -> None:
    """The last token of every sequence, as generation takes it."""
    inputs = [normal(3, 5, 20, dtype=dtype), normal(20, dtype=dtype, seed=1)]
    compare(lambda x, weight, form: fused.rms_norm(x[:, -1], weight, 1e-3, form), inputs)


def test_swiglu(dtype: torch.dtype) -> None:
    inputs = [6 * normal(3, 70, 37, dtype=dtype, seed=seed) for seed in (0, 1)]
    compare(fused.swiglu, inputs)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(("batch", "length", "heads", "head"), [(1, 1, 1, 16), (2, 97, 2, 18), (3, 65, 1, 128)])
def test_heads_of_norm_1(batch: int, length: int, heads: int, head: int, width: int, dtype: torch.dtype) -> None:
    inputs = [normal(batch, length, heads * head, dtype=dtype), normal(heads * head, width, dtype=dtype, seed=1)]
    y = compare(lambda x, weight, form: fused.unit_heads(x, weight, None, None, head, form), inputs)
    assert y.shape == (batch, length, heads, head)
    torch.testing.assert_close(y.float().norm(dim=-1), torch.ones(y.shape[:3], device=DEVICE), rtol=1e-2, atol=0)


def test_heads_of_packed_documents(dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, 0, 1, 3, 6, 6, 70, 71, 140, 140], dtype=torch.int32, device=DEVICE)
    position = positions_in_documents(bounds, 140)
    inputs = [normal(1, 140, 36, dtype=dtype), normal(36, 4, dtype=dtype, seed=1)]
    compare(lambda x, weight, form: fused.unit_heads(x, weight, position, None, 18, form), inputs)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 2), (2, 97)])
def test_heads_after_a_history(batch: int, length: int, width: int, dtype: torch.dtype) -> None:
    shapes = [(batch, length, 36), (36, width), (batch, width - 1, 36)]
    inputs = [normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes[: 2 + (width > 1)])]

    def heads(x: Tensor, weight: Tensor, *rest: Tensor | str) -> Tensor:
        *history, form = rest
        before = history[0] if history else x.new_zeros(batch, 0, 36)
        return fused.unit_heads(x, weight, None, before, 18, form)

    compare(heads, inputs)


def test_a_head_of_zeros_stays_zero() -> None:
    x = normal(1, 9, 16, dtype=torch.float32)
    x[:, :5] = 0
    y = fused.unit_heads(x, normal(16, 4, dtype=torch.float32), None, None, 16, "triton")
    assert not y[:, :5].any()
    assert y[:, 5:].isfinite().all()


@pytest.mark.parametrize(
    ("vocabulary", "chunk_tokens", "cap"), [(13, 5, 3.0), (13, 22, 1000.0), (50257, 1000, 30.0), (50257, 9, 3.0)]
)
def test_loss(vocabulary: int, chunk_tokens: int, cap: float, dtype: torch.dtype) -> None:
    """Logits of a standard deviation of 10, beyond the smallest cap. 16-bit logits are off by up to 2^-9 each."""
    targets = torch.randint(vocabulary, (22,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    targets[4:7] = targets[-1] = -100
    inputs = [normal(22, 25, dtype=dtype), 2 * normal(vocabulary, 25, dtype=dtype, seed=1)]
    tolerance = {torch.float32: 3e-5, torch.bfloat16: 2e-2}[dtype]
    losses = compare(
        lambda hidden, weight, form: fused.linear_loss(hidden, weight, targets, cap, chunk_tokens, form),
        inputs,
        tolerance,
    )
    assert losses.dtype == torch.float32
    assert (losses[targets == -100] == 0).all()


@pytest.mark.parametrize(("vocabulary", "rows"), [(13, 5), (101, 64), (50257, 25152), (9000, 8192)])
def test_loss_of_a_vocabulary_in_parts(vocabulary: int, rows: int, dtype: torch.dtype) -> None:
    """Three equal parts against the whole; the last words lie in the first two or in the third."""
    targets = torch.randint(vocabulary, (22,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    targets[4:7] = targets[-1] = -100
    targets[:3] = torch.tensor([0, rows, vocabulary - 1])

    def loss(hidden: Tensor, weight: Tensor, form: str) -> Tensor:
        if form == "torch":
            return fused.linear_loss(hidden, weight, targets, 3.0, 9, form)
        parts = F.pad(weight, (0, 0, 0, 3 * rows - vocabulary)).split(rows)
        words = [min(max(vocabulary - i * rows, 0), rows) for i in range(3)]
        scores = [
            fused.linear_scores(hidden, part, targets - i * rows, words[i], 3.0, 9, form)
            for i, part in enumerate(parts)
        ]
        return fused.losses(torch.stack(scores).logsumexp(0), targets)

    inputs = [normal(22, 25, dtype=dtype), 2 * normal(vocabulary, 25, dtype=dtype, seed=1)]
    compare(loss, inputs, {torch.float32: 3e-5, torch.bfloat16: 2e-2}[dtype])


@pytest.mark.parametrize("target", [13, 63, 64, -1])
def test_the_loss_of_no_word_is_not_a_number(target: int) -> None:
    targets = torch.tensor([3, target, -100, 12], device=DEVICE)
    inputs = [normal(size, 25, dtype=torch.float32) for size in (4, 13)]
    losses = fused.linear_loss(*inputs, targets, 3.0, 9, "triton")
    assert losses.isnan().tolist() == [False, True, False, False]


def make_model(implementation: str, mesa: str = "torch") -> Backbone:
    values = {"vocabulary_size": 211, "width": 48, "layers": 2, "heads": 3, "head_dim": 16}
    settings = {"implementation": mesa, "solver_tolerance": 1e-6, "solver_steps": 100}
    model = Backbone(ModelConfig.model_validate(values | {"implementation": implementation, "mesa": settings}))
    initialize(model, seed=0)
    return model.to(DEVICE)


@pytest.mark.parametrize("documents", [None, [0, 3, 3, 41, 80]])
def test_the_whole_model_in_both_forms(documents: list[int] | None) -> None:
    tokens = torch.randint(211, (2, 41), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    cu_seqlens = None if documents is None else torch.tensor(documents, dtype=torch.int32, device=DEVICE)
    found: list[dict[str, Tensor]] = []
    for implementation in ("torch", "triton"):
        model = make_model(implementation)
        losses = model(inputs, targets, cu_seqlens, 32)
        losses.sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"losses": losses.detach()} | gradients)
    assert len(found[0]) == len(list(model.parameters())) + 1
    for name, exact in found[0].items():
        error = (found[1][name] - exact).norm() / exact.norm()
        assert error <= 1e-4, f"{name}: {error:.1e}"


def test_generation_goes_on_from_a_prefill() -> None:
    """The chunkwise form, then steps, both with Triton's input path."""
    model = make_model("triton")
    tokens = torch.randint(211, (2, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.no_grad():
        first, states = model.decode(tokens[:, :8])
        for t in range(8, 12):
            logits, states = model.decode(tokens[:, t : t + 1], states)
        plain = make_model("torch")
        torch.testing.assert_close(first, plain.decode(tokens[:, :8])[0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(logits, plain.decode(tokens)[0], rtol=1e-3, atol=1e-3)


@on_gpu
def test_a_training_pass_in_bf16_is_the_same_every_time() -> None:
    model = make_model("auto", mesa="triton").bfloat16()
    tokens = torch.randint(211, (4, 257), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    runs = []
    for _ in range(2):
        model.zero_grad()
        losses = model(tokens[:, :-1], tokens[:, 1:].contiguous())
        losses.sum().backward()
        runs.append([losses.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *runs))
    exact = make_model("torch")(tokens[:, :-1], tokens[:, 1:].contiguous())
    torch.testing.assert_close(runs[0][0].mean(), exact.mean(), rtol=5e-3, atol=0)
    assert F.cosine_similarity(runs[0][0].flatten(), exact.detach().flatten(), dim=0) > 0.999
