"""Start values against the paper's (sections E.1, G.2, G.5): fan-in variance of every matrix, 2/N on those that write
to the residual stream, Lambda = 1; and that they depend on seed and name alone."""

import pytest
import torch
from torch.nn import functional as F

from mesatron.config import ModelConfig
from mesatron.model.backbone import Backbone
from mesatron.model.parameter import initialize

WIDTH, LAYERS = 192, 5


def build(layers: int = LAYERS, seed: int = 0, **settings: object) -> Backbone:
    values = {"vocabulary_size": 500, "width": WIDTH, "layers": layers, "heads": 3, "head_dim": 64} | settings
    model = Backbone(ModelConfig.model_validate(values))
    initialize(model, seed)
    return model


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_spread_of_every_parameter(layers: int) -> None:
    model = build(layers)
    mlp_width, residual = 3 * WIDTH, 2.0 / layers
    variance = {
        "q": 1 / WIDTH, "k": 1 / WIDTH, "v": 1 / WIDTH, "output": residual / WIDTH, "gate": 1 / WIDTH, "up": 1 / WIDTH,
        "down": residual / mlp_width, "gamma": 1 / WIDTH, "beta": 1 / WIDTH, "q_convolution": 1 / 4,
        "k_convolution": 1 / 4, "embedding": 1 / WIDTH,
    }  # fmt: skip
    constant = {"norm.weight": 1.0, "mixer_norm.weight": 1.0, "mlp_norm.weight": 1.0, "gamma.bias": 0, "beta.bias": 0}
    for name, parameter in model.named_parameters():
        module, kind = name.split(".")[-2:]
        if kind == "theta":
            lam = 0.25 + F.softplus(parameter.double())
            torch.testing.assert_close(lam, torch.ones_like(lam), rtol=0, atol=1e-7)
        elif f"{module}.{kind}" in constant:
            assert (parameter == constant[f"{module}.{kind}"]).all()
        else:
            deviations = 4 / parameter.numel() ** 0.5  # of the estimates below, at four standard errors
            assert parameter.var().item() == pytest.approx(variance[module], rel=deviations * 2**0.5), name
            assert abs(parameter.mean().item()) < deviations * variance[module] ** 0.5, name


def test_the_residual_stream_starts_at_variance_one() -> None:
    model = build()
    embedded = model.embedding(torch.arange(500))
    assert embedded.var().item() == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize(("initial", "bound"), [(1.0, 0.25), (50.0, 49.0), (2000.0, 0.0), (0.2501, 0.25)])
def test_lambda_starts_where_the_config_says(initial: float, bound: float) -> None:
    model = build(1, mesa={"lambda_initial": initial, "lambda_lower_bound": bound})
    model.blocks[0].mixer(torch.zeros(1, 1, WIDTH))
    lam = model.blocks[0].mixer.observations["lambda"]
    torch.testing.assert_close(lam, torch.full_like(lam, initial), rtol=1e-6, atol=0)


def test_values_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = dict(build(LAYERS).named_parameters())
    assert torch.equal(torch.get_rng_state(), state), "drawing start values must leave torch's own generator alone"
    torch.manual_seed(2)
    shallower, other_seed = dict(build(2).named_parameters()), dict(build(seed=1).named_parameters())
    for name, parameter in shallower.items():
        if not name.endswith(("output.weight", "down.weight")):  # whose scale holds the number of layers
            assert torch.equal(parameter, first[name])
    drawn = {name: p.flatten() for name, p in first.items() if p.std() > 0 and p.numel() > 1000}
    assert len(drawn) > 20
    for name, values in drawn.items():
        assert abs(torch.corrcoef(torch.stack([values, other_seed[name].flatten()]))[0, 1]) < 0.1
    alike = torch.stack([values for name, values in drawn.items() if values.numel() == WIDTH * WIDTH])
    correlations = torch.corrcoef(alike) - torch.eye(len(alike))
    assert correlations.abs().max() < 0.05


def test_weight_decay_is_for_matrices_only() -> None:
    decayed = {name for name, parameter in build(1).named_parameters() if parameter.info.weight_decay}
    assert decayed == {
        f"blocks.0.{name}.weight"
        for name in (
            "mixer.q", "mixer.k", "mixer.v", "mixer.gamma", "mixer.beta", "mixer.q_convolution", "mixer.k_convolution",
            "mixer.output", "mlp.gate", "mlp.up", "mlp.down",
        )
    }  # fmt: skip
