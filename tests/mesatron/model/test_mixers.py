"""Every mixer through one grid: the parallel form against its recurrence token by token, in float64.

Outputs, gradients, initial and final states, packed documents, sequences in two calls, decoding and the size of what it
keeps; recurrences in runs of a sequence, as context parallelism takes them; several steps of real training, cut and
resumed; on a GPU fla-core's kernels against the same reference. Layouts over processes are in prove/test_table.py.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from mesatron_kernels import MesaState
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from mesatron.config import ModelConfig
from mesatron.errors import ConfigError
from mesatron.evaluate.checkpoint import load_model
from mesatron.evaluate.generation import generate
from mesatron.model.attention import Attention, block_mask, rotate, seen_keys
from mesatron.model.backbone import Backbone
from mesatron.model.parameter import initialize
from mesatron.model.recurrences import (
    MLSTM,
    RGLRU,
    DeltaInputs,
    DeltaRule,
    LinearAttention,
    LinearInputs,
    LinearState,
    Mesa,
    MesaInputs,
    MesaRLS,
    MLSTMInputs,
    MLSTMState,
    Recurrence,
    RGLRUInputs,
    RGLRUState,
)
from mesatron.model.recurrences.fla_core import refusal
from mesatron.model.recurrences.recurrence import starts_of

VOCABULARY, LENGTH, BATCH = 23, 29, 2
BOUNDS = [0, 1, 3, 12, 20, LENGTH, LENGTH + 7, 2 * LENGTH]
SOLVED = {"solver_tolerance": 1e-13, "solver_steps": 60, "chunk_size": 8}
SECTIONS = {"mesa": SOLVED, "mesa_rls": SOLVED} | {
    name: {"chunk_size": 8} for name in ("gla", "mamba2", "mlstm", "deltanet", "gated_deltanet", "hawk")
}
MIXERS = [
    "mesa", "transformer", "swa-4", "gla", "mamba2", "mlstm", "deltanet", "gated_deltanet", "hawk", "hawk_mesa",
    "mesa_rls", ["mesa", "swa-5"],
]  # fmt: skip


def make_model(mixer: Any, implementation: str = "auto") -> Backbone:
    """Three layers in float64 whose parameters all differ from their start."""
    config = ModelConfig.model_validate({
        "vocabulary_size": VOCABULARY, "width": 15, "layers": 3, "heads": 3, "head_dim": 5, "mlp_ratio": 1.4,
        "norm_epsilon": 0.01, "mixer": mixer, **SECTIONS,
    })  # fmt: skip
    chosen = {
        name: getattr(config, name).model_copy(update={"implementation": implementation})
        for name in config.used_mixers
    }  # fmt: skip
    model = Backbone(config.model_copy(update=chosen))
    initialize(model, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.double()


def text(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def numbers_in(state: Any) -> int:
    return sum(map(numbers_in, state)) if isinstance(state, tuple | list) else state.numel()


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert expected.isfinite().all()
    assert (found - expected).norm() <= tolerance * expected.norm().clamp(min=1e-30)


@pytest.fixture(scope="module", params=MIXERS, ids=str)
def models(request: pytest.FixtureRequest) -> tuple[Backbone, Backbone]:
    """The model as it is trained, and with every mixer going token by token."""
    return make_model(request.param), make_model(request.param, "reference")


@pytest.mark.parametrize("packed", [False, True], ids=["sequences", "documents"])
def test_losses_and_gradients_are_those_of_the_recurrence(models: tuple[Backbone, ...], packed: bool) -> None:
    results = []
    for model in models:
        loss = model(text(0), text(1), torch.tensor(BOUNDS) if packed else None)
        gradients = torch.autograd.grad(loss.sum(), list(model.parameters()))
        results.append([loss.detach(), *gradients])
    names = ["loss", *dict(models[0].named_parameters())]
    for name, found, expected in zip(names, *results, strict=True):
        assert (found - expected).norm() <= 1e-9 * expected.norm() + 1e-12, name


def test_packed_documents_equal_separate_ones(models: tuple[Backbone, ...]) -> None:
    tokens, targets = text(0).view(1, -1), text(1).view(1, -1)
    packed = models[0](tokens, targets, torch.tensor(BOUNDS))
    apart = [models[0](tokens[:, i:j], targets[:, i:j]) for i, j in pairwise(BOUNDS)]
    assert_near(packed, torch.cat(apart, 1))


@torch.no_grad()
def test_decoding_equals_the_parallel_form_in_bounded_memory(models: tuple[Backbone, ...]) -> None:
    model = models[0]
    tokens, targets = text(0), text(1)
    expected = model(tokens, targets)
    logits, sizes, states = [], [], None
    for t in range(LENGTH):
        row, states = model.decode(tokens[:, t : t + 1], states)
        logits.append(row)
        sizes.append(numbers_in(states))
    found = F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), targets.flatten(), reduction="none")
    assert_near(found.view(BATCH, LENGTH), expected)
    for cut in (1, 13, LENGTH - 1):
        _, before = model.decode(tokens[:, :cut])
        after, states = model.decode(tokens[:, cut:], before)
        assert_near(after, logits[-1])
        assert numbers_in(states) == sizes[-1]
    grows = "transformer" in str(model.config.mixer)
    # A window of 5 is full after 4 tokens, the convolutions' histories have their size from the start.
    assert (sizes[-1] > sizes[4]) == grows


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HEADS, KEY_SIZE, VALUE_SIZE, CHANNELS, TOKENS = 2, 5, 4, 7, 45
LAM = 0.25 + draw(HEADS, KEY_SIZE, seed=7).abs()
CHUNKED = {"chunk_size": 8}
SOLVER = CHUNKED | {"lam": LAM, "max_steps": 60, "tolerance": 1e-14}


def heads(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of norm 1, and v."""
    q, k = (F.normalize(draw(rows, TOKENS, HEADS, KEY_SIZE, seed=seed), dim=-1) for seed in (1, 2))
    return q, k, draw(rows, TOKENS, HEADS, VALUE_SIZE, seed=3)


def gates(rows: int, width: int = HEADS) -> Tensor:
    """Logarithms of gates that now and then forget all."""
    log_gamma = F.logsigmoid(draw(rows, TOKENS, width, seed=4) + 2)
    log_gamma[:, 7] = -1e4
    return log_gamma


def open_gates(rows: int) -> Tensor:
    return torch.zeros(rows, TOKENS, HEADS, dtype=torch.float64)


def input_gates(rows: int) -> Tensor:
    """Logarithms between about -10 and 14."""
    return 4 * draw(rows, TOKENS, HEADS, seed=9) + 2


def step_sizes(rows: int) -> Tensor:
    return torch.sigmoid(draw(rows, TOKENS, HEADS, seed=8))


def matrices(rows: int) -> LinearState:
    return LinearState(draw(rows, HEADS, VALUE_SIZE, KEY_SIZE, seed=5))


def mesa_states(rows: int) -> MesaState:
    keys = draw(rows, HEADS, KEY_SIZE, KEY_SIZE, seed=6)
    return MesaState(keys @ keys.mT, matrices(rows).G)


def mlstm_states(rows: int) -> MLSTMState:
    return MLSTMState(draw(rows, HEADS, VALUE_SIZE + 1, KEY_SIZE, seed=5), draw(rows, HEADS, seed=6).abs())


class Case(NamedTuple):
    """A recurrence, and its inputs and states for any number of rows."""

    name: str
    kind: Any
    settings: dict[str, Any]
    inputs: Callable[[int], Any]
    state: Callable[[int], Any]

    def build(self, implementation: str) -> Recurrence:
        return self.kind(**self.settings, implementation=implementation)


RECURRENCES = [
    Case("linear", LinearAttention, CHUNKED, lambda n: LinearInputs(*heads(n), gates(n)), matrices),
    Case("delta", DeltaRule, CHUNKED, lambda n: DeltaInputs(*heads(n), step_sizes(n)), matrices),
    Case("gated-delta", DeltaRule, CHUNKED, lambda n: DeltaInputs(*heads(n), step_sizes(n), gates(n)), matrices),
    Case("mlstm", MLSTM, CHUNKED, lambda n: MLSTMInputs(*heads(n), gates(n), input_gates(n)), mlstm_states),
    Case(
        "rg-lru", RGLRU, CHUNKED, lambda n: RGLRUInputs(draw(n, TOKENS, CHANNELS, seed=1), gates(n, CHANNELS)),
        lambda n: RGLRUState(draw(n, CHANNELS, seed=5)),
    ),
    Case("mesa", Mesa, SOLVER, lambda n: MesaInputs(*heads(n), gates(n), step_sizes(n)), mesa_states),
    Case("mesa-rls", MesaRLS, SOLVER, lambda n: MesaInputs(*heads(n), open_gates(n), step_sizes(n)), mesa_states),
]  # fmt: skip
DOCUMENTS = [0, 0, 1, 9, 9, 10, 45, 45]


def tensors_of(state: Any) -> list[Tensor]:
    """What of a state has a meaning: of the mLSTM's memory and scale their product alone."""
    if isinstance(state, MLSTMState):
        return [state.memory * state.m.exp()[..., None, None]]
    return list(state)


def leaves_of(values: Any) -> Any:
    """Copies that take gradients; gates that are 1 throughout are no inputs."""
    return type(values)(*(x if x is None or not x.any() else x.clone().requires_grad_() for x in values))


def differentiate(
    recurrence: Recurrence, inputs: Any, state: Any, bounds: list[int] | None, return_state: bool
) -> list[Tensor]:
    """o, final states, and the gradients of a sum of both with respect to inputs and initial state."""
    inputs, state = leaves_of(inputs), None if state is None else leaves_of(state)
    result = recurrence(inputs, state, None if bounds is None else torch.tensor(bounds), return_state)
    final = tensors_of(result.state) if return_state else []
    total = (result.o * draw(*result.o.shape, seed=10)).sum()
    total = total + sum((x * draw(*x.shape, seed=11)).sum() for x in final)
    leaves = differentiable(inputs) + (tensors_without_scale(state) if state else [])
    return [result.o.detach(), *(x.detach() for x in final), *torch.autograd.grad(total, leaves)]


def differentiable(values: Any) -> list[Tensor]:
    return [x for x in values if x is not None and x.requires_grad]


def tensors_without_scale(state: Any) -> list[Tensor]:
    return [state.memory] if isinstance(state, MLSTMState) else list(state)


@pytest.mark.parametrize("return_state", [False, True], ids=["outputs", "states"])
@pytest.mark.parametrize("with_state", [False, True], ids=["empty", "continued"])
@pytest.mark.parametrize("bounds", [None, DOCUMENTS], ids=["sequences", "documents"])
@pytest.mark.parametrize("case", RECURRENCES, ids=[case.name for case in RECURRENCES])
def test_a_recurrence_equals_its_steps(
    case: Case, bounds: list[int] | None, with_state: bool, return_state: bool
) -> None:
    """Documents of no and of one token, gates that forget all, a state before each and after each."""
    rows = BATCH if bounds is None else 1
    before = case.state(rows if bounds is None else len(bounds) - 1) if with_state else None
    expected = differentiate(case.build("reference"), case.inputs(rows), before, bounds, return_state)
    found = differentiate(case.build("torch"), case.inputs(rows), before, bounds, return_state)
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs, 1e-9)


@pytest.mark.parametrize("starts", [[], [0], [13, 14, 40]], ids=str)
@pytest.mark.parametrize("case", RECURRENCES, ids=[case.name for case in RECURRENCES])
def test_runs_equal_the_whole(case: Case, starts: list[int]) -> None:
    """Five runs, each from the combined summaries of those before it; documents begin anywhere inside them."""
    recurrence = case.build("torch")
    marked = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    marked[:, starts] = True
    marked |= starts_of(None, BATCH, TOKENS, marked.device) if recurrence.marks_starts else False
    results = []
    for runs in (None, 5):
        leaves = leaves_of(case.inputs(BATCH))
        whole = recurrence.reset(leaves, marked)
        if runs is None:
            result = recurrence(whole, None, None, True)
            o, after = result.o, result.state
        else:
            pieces = [type(whole)(*(x.chunk(runs, 1)[i] for x in whole)) for i in range(runs)]
            summaries = [torch.stack(parts) for parts in zip(*map(recurrence.summarize, pieces), strict=True)]
            outputs = [recurrence(p, recurrence.combine([x[:i] for x in summaries])).o for i, p in enumerate(pieces)]
            o, after = torch.cat(outputs, 1), recurrence.combine(summaries)
        total = (o * draw(*o.shape, seed=10)).sum() + sum(x.square().sum() for x in tensors_of(after)) * 1e-3
        gradients = torch.autograd.grad(total, differentiable(leaves))
        results.append([o.detach(), *(x.detach() for x in tensors_of(after)), *gradients])
    for expected, found in zip(*results, strict=True):
        assert_near(found, expected, 1e-9)


@pytest.mark.parametrize("log_gamma", [0.0, -1e-6, -1.0, -20.0, -80.0, float("-inf")])
@pytest.mark.parametrize("case", RECURRENCES, ids=[case.name for case in RECURRENCES])
def test_no_gate_gives_anything_but_numbers(case: Case, log_gamma: float) -> None:
    """In fp32, with log input gates up to 200 where they are exponentials."""
    values = case.inputs(1)
    values = type(values)(*(None if x is None else x.float() for x in values))
    gate = values.log_gamma if values.log_gamma is not None else values.beta
    values = values._replace(log_gamma=torch.full_like(gate, log_gamma))
    if hasattr(values, "log_i"):
        values = values._replace(log_i=values.log_i * 20)
    leaves = leaves_of(values)
    o = case.build("torch")(leaves).o
    gradients = torch.autograd.grad(o.sum(), differentiable(leaves))
    assert all(x.isfinite().all() for x in (o, *gradients))


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("cached", [0, 3, 30])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_equals_the_softmax_written_out(window: int | None, cached: int, documents: bool) -> None:
    """Queries of the last 33 tokens, in blocks where there is a window; a rotation keeps products of equal distance."""
    S = cached + 33
    q, k, v = draw(2, 33, 3, 5, seed=1), draw(2, S, 3, 5, seed=2), draw(2, S, 3, 4, seed=3)
    segments = torch.stack([torch.arange(S) // 7, torch.arange(S) // 50]) if documents else None
    results = []
    for implementation in ("torch", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = Attention(window, implementation=implementation)(*leaves, segments)
        results.append([o, *torch.autograd.grad((o * draw(*o.shape, seed=4)).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        if expected.norm() > 1e-9:
            assert_near(found, expected)
        else:  # with one key to see, weights are 1 whatever the query
            assert found.norm() < 1e-9
    places = torch.arange(S)
    near, far = ((rotate(k, places + shift, 1e4)[:, 1:] * rotate(k, places + shift, 1e4)[:, :-1]).sum(-1)
                 for shift in (0, 1000))  # fmt: skip
    assert_near(far, near)


FLEX_WINDOWS, FLEX_LENGTHS = [None, 1, 4, 150, 1000], [(33, 33), (300, 300), (256, 256), (129, 640)]


def documents_of(S: int) -> Tensor:
    """Two rows of them, short ones and ones of more than a block."""
    return torch.stack([torch.arange(S) // 7, torch.arange(S) // 130])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("T", "S"), FLEX_LENGTHS)
def test_flex_attention_equals_the_softmax_written_out(T: int, S: int, documents: bool) -> None:
    """As torch writes it out on a CPU; the blocks that are skipped or whole are those that torch finds in all pairs."""
    q, k, v = draw(2, T, 2, 16, seed=1), draw(2, S, 2, 16, seed=2), draw(2, S, 2, 16, seed=3)
    segments = documents_of(S) if documents else None
    for window in FLEX_WINDOWS:
        found, expected = (Attention(window, implementation=name)(q, k, v, segments) for name in ("flex", "reference"))
        assert_near(found, expected)
        mask = block_mask(*seen_keys(q.transpose(1, 2), k.transpose(1, 2), window, segments), S)
        exact = create_block_mask(mask.mask_mod, 2, 1, T, S, device="cpu")
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(mask, name), getattr(exact, name)), (window, name)
        assert torch.equal(mask.to_dense(), exact.to_dense())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled FlexAttention needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("documents", [False, True])
def test_flex_attention_on_a_gpu(documents: bool, dtype: torch.dtype) -> None:
    """Outputs and gradients through a recomputation, against the softmax in float64."""
    device = torch.device("cuda")
    for D, (T, S) in product((48, 128), FLEX_LENGTHS):
        q, k, v = (draw(2, n, 2, D, seed=seed).to(device, dtype) for seed, n in enumerate((T, S, S)))
        segments = documents_of(S).to(device) if documents else None
        cotangent = draw(2, T, 2, D, seed=4).to(device)
        for window in FLEX_WINDOWS:
            results = []
            for name, given in (("flex", dtype), ("reference", torch.float64)):
                leaves = [x.to(given, copy=True).requires_grad_() for x in (q, k, v)]
                attention = Attention(window, implementation=name)
                o = checkpoint(attention, *leaves, segments, use_reentrant=False, preserve_rng_state=False)
                results.append([o, *torch.autograd.grad((o.double() * cotangent).sum(), leaves)])
            for found, expected in zip(*results, strict=True):
                # With one key to see, weights are 1 whatever the query.
                scale = expected.norm() + (expected.norm() < 1e-9) * cotangent.norm()
                assert (found - expected).norm() <= (2e-2 if dtype == torch.bfloat16 else 1e-4) * scale, (D, T, window)


TRAINED = ["transformer", "swa-8", "gla", "mamba2", "mlstm", "deltanet", "gated_deltanet", "hawk_mesa", "mesa_rls"]


def test_training_and_resuming(
    tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable, run_of: Callable
) -> None:
    """One layer of every mixer in one model: two steps, a checkpoint and two more end as four steps in one go."""
    settings = {"model.mixer": TRAINED, "model.layers": 10, "train.steps": 4, "train.warmup_steps": 0}
    settings |= {"monitor.histogram_every_steps": 2}
    whole, cut = (odd_config(tmp_path / name, short_data, **settings) for name in ("whole", "cut"))
    assert train(1, whole).exit_code == 0
    first = train(1, cut, "--stop-at-step=2")
    assert first.exit_code == 75, first.errors
    second = train(1, cut)
    assert second.exit_code == 0, second.errors
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert f"gla torch ({refusal('simple_gla', torch.float32, device)})" in second.output
    assert run_of(cut).checksums(4) == run_of(whole).checksums(4)
    assert run_of(cut).curve("train/loss") == run_of(whole).curve("train/loss")
    gates = {tag for tag, *_ in run_of(whole).events() if tag.startswith(("a/", "log_i/"))}
    assert gates == {"a/layer_07", "log_i/layer_04"}


def test_a_model_without_a_solver_generates_and_takes_no_solver_settings(
    tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable, run_of: Callable
) -> None:
    config = odd_config(
        tmp_path / "run", short_data, **{"model.mixer": ["gla", "swa-3"], "train.steps": 1, "train.warmup_steps": 0}
    )
    assert train(1, config).exit_code == 0
    run = run_of(config).path
    trained = load_model(run)
    prompt = [1, 5, 7, 2]
    tokens = list(generate(trained.model, torch.tensor(prompt, device=trained.device), 12))
    with torch.no_grad():
        logits, _ = trained.model.decode(torch.tensor([[*prompt, *tokens[:-1]]], device=trained.device))
    assert logits.argmax() == tokens[-1]
    with pytest.raises(ConfigError, match=r"has no mixer with a solver \(it has gla, swa\); leave out solver_steps"):
        load_model(run, {"solver_steps": 3})


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="fla-core's kernels need a GPU")
KERNELS = {
    "linear": "simple_gla", "delta": "delta_rule", "gated-delta": "gated_delta_rule", "rg-lru": "hgrn",
    "mesa": "mesa_net",
}  # fmt: skip


@GPU
@pytest.mark.parametrize("bounds", [None, [0, 1, 200, 200, 512]], ids=["sequences", "documents"])
@pytest.mark.parametrize("continued", [False, True], ids=["empty", "continued"])
@pytest.mark.parametrize(("name", "D"), [*((name, 64) for name in KERNELS), ("mesa", 128)])
def test_fla_core_equals_the_torch_form(name: str, D: int, continued: bool, bounds: list[int] | None) -> None:
    """Outputs, states and gradients in bf16 (hgrn: fp32), 512 tokens; gradients of o of about 1, for mesa_net loses
    smaller ones."""
    device = torch.device("cuda")
    dtype = torch.float32 if name == "rg-lru" else torch.bfloat16
    reason = refusal(KERNELS[name], dtype, device)
    if reason:
        pytest.skip(reason)
    rows, T, h = (2 if bounds is None else 1), 512, 3
    sequences = rows if bounds is None else len(bounds) - 1
    q, k = (F.normalize(draw(rows, T, h, D, seed=seed), dim=-1) for seed in (1, 2))
    v, beta = draw(rows, T, h, D, seed=3), torch.sigmoid(draw(rows, T, h, seed=4))
    log_gamma = F.logsigmoid(draw(rows, T, h, seed=5) + 4)
    lam = (0.25 + draw(h, D, seed=8).abs()).to(device, torch.float32).requires_grad_()
    kinds: dict[str, tuple[Any, Any]] = {
        "linear": (LinearAttention, LinearInputs(q, k, v, log_gamma)),
        "delta": (DeltaRule, DeltaInputs(q, k, v, beta)),
        "gated-delta": (DeltaRule, DeltaInputs(q, k, v, beta, log_gamma)),
        "rg-lru": (RGLRU, RGLRUInputs(v.flatten(2), F.logsigmoid(draw(rows, T, h * D, seed=5) + 4))),
        "mesa": (partial(Mesa, lam, 30, 1e-10, 64), MesaInputs(q, k, v, log_gamma, beta)),
    }
    kind, exact = kinds[name]
    before = None
    if continued:
        G, keys = (draw(sequences, h, D, D, seed=seed) / D**0.5 for seed in (6, 7))
        before = {"rg-lru": RGLRUState(G[:, :, 0].flatten(1)), "mesa": MesaState(keys @ keys.mT, G)}.get(
            name, LinearState(G)
        )
    gates = ("log_gamma", "beta")
    rounded = {
        field: None if x is None else x.to(device, torch.float32 if field in gates else dtype)
        for field, x in exact._asdict().items()
    }  # fmt: skip
    found = differentiate_on(device, kind(implementation="fla"), type(exact)(**rounded), before, bounds)
    doubled = type(exact)(*(None if x is None else x.double() for x in rounded.values()))
    expected = differentiate_on(device, kind(implementation="torch"), doubled, before, bounds)
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours.double(), theirs, 1e-5 if dtype == torch.float32 else 2e-2)


def differentiate_on(
    device: torch.device, recurrence: Any, inputs: Any, state: Any, bounds: list[int] | None
) -> list[Tensor]:
    """o, final states and gradients, that of Lambda among them where there is one; initial states are in fp32."""
    leaves = leaves_of(inputs)
    before = None if state is None else leaves_of(type(state)(*(x.to(device, torch.float32) for x in state)))
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=device)
    result = recurrence(leaves, before, cu_seqlens, True)
    total = (result.o.double() * draw(*result.o.shape, seed=10).to(device)).sum()
    total = total + sum((x.double() * draw(*x.shape, seed=11).to(device)).sum() for x in result.state)
    learned = [recurrence.lam] if isinstance(recurrence, Mesa) else []
    gradients = torch.autograd.grad(total, [*differentiable(leaves), *differentiable(before or ()), *learned])
    return [result.o.detach(), *(x.detach() for x in result.state), *gradients]
