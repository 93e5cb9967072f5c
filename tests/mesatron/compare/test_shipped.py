"""The shipped comparisons: every mixer is in them, and their models and budgets are what their comments say."""

from pathlib import Path

import pytest

from mesatron.compare.variants import load_comparison

CONFIGS = Path(__file__).parents[3] / "configs/compare"
MIXERS = {
    "transformer", "swa", "gla", "mamba2", "mlstm", "deltanet", "gated_deltanet", "hawk", "hawk_mesa", "mesa",
    "mesa_rls",
}  # fmt: skip


@pytest.mark.parametrize(("name", "parameters", "tokens"), [("cpu", 0.955e6, 328e3), ("h200", 46e6, 19.7e6)])
def test_every_mixer_at_one_size(name: str, parameters: float, tokens: float) -> None:
    comparison = load_comparison(CONFIGS / f"{name}.yaml")
    assert {variant.name.partition("-")[0] for variant in comparison.variants} == MIXERS
    assert comparison.reference == "transformer"
    for variant in comparison.variants:
        assert variant.config.model.mixer == variant.name.removesuffix("-fla")
        assert (variant.config.model.mesa.implementation == "fla") == variant.name.endswith("-fla")
        assert variant.config.model.parameter_count() == pytest.approx(parameters, rel=0.02), variant.name
        trained = variant.config.train.steps * variant.config.tokens_per_step
        assert trained == pytest.approx(tokens, rel=0.02)
