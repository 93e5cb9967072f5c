"""The whole model against the paper's formulas written as a loop over tokens in float64 with dense solves (arXiv
2506.05233, sections 2, E, G.2, G.5): logits, losses, gradients, packed documents and decoding."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model.backbone import Backbone
from mesatron.model.parameter import ParameterInfo, initial_value, initialize

VOCABULARY, LENGTH = 23, 29
EXACT = {"solver_tolerance": 1e-14, "solver_steps": 60, "gamma_cap": 0.9, "lambda_lower_bound": 0.2, "chunk_size": 8}


def make_model(dtype: torch.dtype = torch.float64, **mesa: object) -> Backbone:
    """A tiny model whose parameters all differ from their start, with gates anywhere between 0 and 1."""
    config = ModelConfig.model_validate({
        "vocabulary_size": VOCABULARY, "width": 15, "layers": 3, "heads": 3, "head_dim": 5, "mlp_ratio": 1.4,
        "logit_cap": 2.5, "norm_epsilon": 0.01, "mesa": EXACT | mesa,
    })  # fmt: skip
    model = Backbone(config)
    initialize(model, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(initial_value(name, parameter.shape, ParameterInfo(0.0, 0.3, True), seed=11))
    return model.to(dtype)


def make_text(batch: int = 1, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain_logits(model: Backbone, tokens: Tensor) -> Tensor:
    """Logits [T, vocabulary] for one document [T], one token after the other."""
    config, weights = model.config, dict(model.state_dict())
    heads, head_dim, mesa = config.heads, config.head_dim, config.mesa

    def norm(x: Tensor, name: str) -> Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        return x / (mean_square + config.norm_epsilon).sqrt() * weights[f"{name}.weight"]

    def query_or_key(x: Tensor, block: str, name: str) -> Tensor:
        x, filters = x @ weights[f"{block}.mixer.{name}.weight"].T, weights[f"{block}.mixer.{name}_convolution.weight"]
        mixed = [
            sum(filters[:, lag] * x[t - lag] for lag in range(mesa.convolution_width) if t >= lag)
            for t in range(len(x))
        ]
        activated = F.silu(torch.stack(mixed)).view(len(x), heads, head_dim)
        return activated / activated.norm(dim=-1, keepdim=True)

    def gate(x: Tensor, block: str, name: str) -> Tensor:
        logits = x @ weights[f"{block}.mixer.{name}.weight"].T + weights[f"{block}.mixer.{name}.bias"]
        return 1 / (1 + (-logits).exp())

    def mixer(x: Tensor, block: str) -> Tensor:
        q, k = query_or_key(x, block, "q"), query_or_key(x, block, "k")
        v = (x @ weights[f"{block}.mixer.v.weight"].T).view(len(x), heads, head_dim)
        beta = gate(x, block, "beta")
        gamma = gate(x, block, "gamma") * (1 - (1 - mesa.gamma_cap) * beta**2)
        lam = mesa.lambda_lower_bound + (1 + weights[f"{block}.mixer.theta"].exp()).log()
        H = torch.zeros(heads, head_dim, head_dim, dtype=x.dtype)
        G = torch.zeros_like(H)
        outputs = []
        for t in range(len(x)):
            decay, rate = gamma[t, :, None, None], beta[t, :, None, None]
            H = decay * H + rate * k[t, :, :, None] * k[t, :, None, :]
            G = decay * G + rate * v[t, :, :, None] * k[t, :, None, :]
            solved = torch.linalg.solve(H + torch.diag_embed(lam), q[t])
            outputs.append((G @ solved[:, :, None]).squeeze(-1))
        normed = norm(torch.stack(outputs), f"{block}.mixer.norm")
        return normed.reshape(len(x), -1) @ weights[f"{block}.mixer.output.weight"].T

    x = weights["embedding.weight"][tokens] * config.width**0.5
    for number in range(config.layers):
        block = f"blocks.{number}"
        x = x + mixer(norm(x, f"{block}.mixer_norm"), block)
        normed = norm(x, f"{block}.mlp_norm")
        up, opened = (normed @ weights[f"{block}.mlp.{name}.weight"].T for name in ("up", "gate"))
        x = x + (opened / (1 + (-opened).exp()) * up) @ weights[f"{block}.mlp.down.weight"].T
    logits = norm(x, "norm") @ weights["embedding.weight"].T
    return config.logit_cap * torch.tanh(logits / config.logit_cap)


def plain_losses(model: Backbone, tokens: Tensor, targets: Tensor) -> Tensor:
    return -plain_logits(model, tokens).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


@pytest.mark.parametrize("implementation", ["reference", "torch"])
@pytest.mark.parametrize("settings", [{}, {"chunk_size": 64}, {"convolution_width": 1}, {"gamma_cap": 1.0}])
def test_losses_are_those_of_the_formulas(implementation: str, settings: dict) -> None:
    model = make_model(implementation=implementation, **settings)
    tokens, targets = make_text(2), make_text(2, seed=1)
    expected = torch.stack([plain_losses(model, *pair) for pair in zip(tokens, targets, strict=True)])
    torch.testing.assert_close(model(tokens, targets), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.15)])
def test_lower_precision_stays_near_and_losses_are_fp32(dtype: torch.dtype, tolerance: float) -> None:
    tokens, targets = make_text(), make_text(seed=1)
    losses = make_model(dtype, solver_tolerance=1e-7)(tokens, targets)
    assert losses.dtype == torch.float32
    expected = plain_losses(make_model(), tokens[0], targets[0])
    torch.testing.assert_close(losses[0].double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_finite_differences(packed: bool) -> None:
    """Of the summed loss along a random direction of every parameter, documents of 1 to 9 tokens when packed."""
    model = make_model()
    tokens, targets = make_text(2), make_text(2, seed=1)
    targets[0, 3:6] = -100
    bounds = torch.tensor([0, 1, 3, 12, 20, LENGTH, LENGTH + 7, 2 * LENGTH]) if packed else None
    loss = model(tokens, targets, bounds).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    generator, step = torch.Generator().manual_seed(9), 1e-6
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        direction = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        start, sides = parameter.detach().clone(), []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.copy_(start + sign * step * direction)
                sides.append(model(tokens, targets, bounds).sum())
        with torch.no_grad():
            parameter.copy_(start)
        slope = (sides[0] - sides[1]) / (2 * step)
        assert abs(slope) > 1e-4, f"{name} does not matter"
        torch.testing.assert_close(
            (gradient * direction).sum(), slope, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_token_changes_no_earlier_loss() -> None:
    """At the training tolerance too: a later token must not even change how far an earlier one is solved."""
    for mesa in ({}, {"solver_tolerance": 1e-4}):
        model = make_model(torch.float32, **mesa)
        tokens, targets = make_text(), make_text(seed=1)
        with torch.no_grad():
            before = model(tokens, targets)[0]
            for place in (0, 7, 8, LENGTH - 1):
                changed = tokens.clone()
                changed[0, place] = (changed[0, place] + 1) % VOCABULARY
                after = model(changed, targets)[0]
                torch.testing.assert_close(after[:place], before[:place], rtol=0, atol=0)
                assert (after[place] - before[place]).abs() > 1e-4


def test_packed_documents_are_as_if_alone() -> None:
    """Losses and gradients; documents shorter than the convolution, across chunk borders, two sequences in one row."""
    model = make_model()
    tokens, targets = make_text(2), make_text(2, seed=1)
    bounds = [0, 1, 3, 6, 10, 27, LENGTH, LENGTH + 16, 2 * LENGTH]
    packed = model(tokens, targets, torch.tensor(bounds, dtype=torch.int32))
    alone = torch.cat([
        model(tokens.view(1, -1)[:, start:end], targets.view(1, -1)[:, start:end])[0]
        for start, end in itertools.pairwise(bounds)
    ])  # fmt: skip
    torch.testing.assert_close(packed.view(-1), alone, rtol=0, atol=1e-10)
    parameters = list(model.parameters())
    weights = torch.linspace(-1, 1, 2 * LENGTH, dtype=torch.float64)
    ours = torch.autograd.grad((packed.view(-1) * weights).sum(), parameters)
    theirs = torch.autograd.grad((alone * weights).sum(), parameters)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
    flowing = model(tokens, targets)
    assert (flowing[0, 1:] - packed[0, 1:]).abs().max() > 0.01


def steps_of(model: Backbone, tokens: Tensor, cuts: list[int]) -> Iterator[tuple[int, Tensor, list]]:
    """Decode [B, T] in pieces that end at `cuts`: position, logits and states after each."""
    states = None
    for start, end in itertools.pairwise([0, *cuts]):
        logits, states = model.decode(tokens[:, start:end], states)
        yield end - 1, logits, states


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("cuts", [range(1, LENGTH + 1), range(2, LENGTH + 1), [17, 18, 19, 26, 28, 29], [3, 4, 12, 29]])
@torch.inference_mode()
def test_decoding_in_pieces_gives_the_logits_of_the_whole(
    cuts: range | list[int], dtype: torch.dtype, tolerance: float
) -> None:
    model, tokens = make_model(dtype, **({} if dtype == torch.float64 else {"solver_tolerance": 1e-7})), make_text(2)
    expected = torch.stack([plain_logits(make_model(), text) for text in tokens])
    for position, logits, _ in steps_of(model, tokens, list(cuts)):
        torch.testing.assert_close(logits.double(), expected[:, position], rtol=0, atol=tolerance)


@torch.inference_mode()
def test_the_state_does_not_grow_or_change_behind_ones_back() -> None:
    model, tokens = make_model(), make_text()

    def tensors(states: list) -> list[Tensor]:
        return [tensor for state in states for tensor in (*state.memory, state.q_history, state.k_history)]

    seen = [(states, [t.clone() for t in tensors(states)]) for *_, states in steps_of(model, tokens, [1, 2, 9, 10, 29])]
    for states, copies in seen:
        assert [t.shape for t in copies] == [t.shape for t in seen[0][1]]
        assert sum(t.untyped_storage().nbytes() for t in tensors(states)) == sum(
            t.untyped_storage().nbytes() for t in tensors(seen[0][0])
        )
        torch.testing.assert_close(tensors(states), copies, rtol=0, atol=0)


def test_loss_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    tokens, targets = make_text(2), make_text(2, seed=1)
    whole: Callable[..., Tensor] = lambda chunk: model(tokens, targets, chunk_tokens=chunk)  # noqa: E731
    for chunk in (1, 7, 57):
        torch.testing.assert_close(whole(chunk), whole(8192), rtol=0, atol=1e-13)
