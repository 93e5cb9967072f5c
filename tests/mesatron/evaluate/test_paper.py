"""The paper's table against its own column of averages, and which runs it is shown for."""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from mesatron.config import load_config
from mesatron.evaluate.paper import PERPLEXITIES, TEXTS, paper_perplexity

PAPER = Path(__file__).parents[3] / "configs/paper"
AVERAGES = {
    ("145M", "15B"): {
        "hawk": 25.08,
        "mamba2": 23.23,
        "gla": 21.87,
        "mlstm": 21.90,
        "deltanet": 21.68,
        "gated_deltanet": 21.56,
        "mesa": 21.47,
        "hawk_mesa": 21.15,
        "transformer": 21.26,
    },
    ("400M", "15B"): {
        "hawk": 18.30,
        "mamba2": 18.37,
        "gla": 17.28,
        "mlstm": 17.27,
        "deltanet": 17.43,
        "gated_deltanet": 17.00,
        "mesa": 16.93,
        "hawk_mesa": 16.85,
        "swa-4": 31.66,
        "swa-64": 20.40,
        "swa-256": 18.69,
        "swa-1024": 17.58,
        "transformer": 17.15,
    },
    ("1B", "15B"): {
        "hawk": 16.17,
        "mamba2": 16.27,
        "gla": 15.55,
        "mlstm": 15.65,
        "deltanet": 15.50,
        "gated_deltanet": 15.25,
        "mesa": 15.17,
        "hawk_mesa": 15.05,
        "swa-4": 27.20,
        "swa-64": 18.00,
        "swa-256": 16.53,
        "swa-1024": 15.61,
        "transformer": 15.31,
    },
    ("145M", "50B"): {
        "hawk": 23.59,
        "mamba2": 21.73,
        "gla": 20.62,
        "mlstm": 20.57,
        "deltanet": 20.49,
        "gated_deltanet": 20.35,
        "mesa": 20.34,
        "hawk_mesa": 20.02,
        "transformer": 19.89,
    },
    ("400M", "50B"): {
        "hawk": 16.52,
        "mamba2": 16.69,
        "gla": 16.05,
        "mlstm": 15.98,
        "deltanet": 16.00,
        "gated_deltanet": 15.79,
        "mesa": 15.67,
        "hawk_mesa": 15.65,
        "swa-4": 25.46,
        "swa-64": 17.95,
        "swa-256": 16.85,
        "swa-1024": 15.88,
        "transformer": 15.66,
    },
    ("1B", "50B"): {
        "hawk": 14.43,
        "mamba2": 14.58,
        "gla": 14.03,
        "mlstm": 14.04,
        "deltanet": 14.05,
        "gated_deltanet": 13.87,
        "mesa": 13.79,
        "hawk_mesa": 13.75,
        "swa-4": 21.54,
        "swa-64": 15.85,
        "swa-256": 14.81,
        "swa-1024": 13.97,
        "transformer": 13.79,
    },
}


def test_rows_have_the_averages_that_the_paper_prints() -> None:
    """It rounds some of them down."""
    for setting, averages in AVERAGES.items():
        assert PERPLEXITIES[setting].keys() == averages.keys()
        for mixer, average in averages.items():
            row = PERPLEXITIES[setting][mixer]
            assert len(row) == len(TEXTS)
            assert mean(row) == pytest.approx(average, abs=0.0101), (setting, mixer)


@pytest.mark.parametrize(
    ("name", "override", "perplexity"),
    [
        ("mesanet-140m-15b", "train.seed=1", 17.02),
        ("mesanet-440m-50b", "train.seed=1", 12.34),
        ("mesanet-1b-50b", "train.steps=95000", 10.83),
        ("mesanet-1b-50b", "train.steps=90000", None),
        ("mesanet-1b-50b", "model.layers=27", None),
        ("mesanet-1b-50b", "model.vocabulary_size=32000", None),
        ("mesanet-1b-50b", "model.mesa.solver_steps=5", None),
    ],
)
def test_only_runs_like_the_paper_s_have_a_figure_beside_them(name: str, override: str, perplexity: Any) -> None:
    assert paper_perplexity(load_config(PAPER / f"{name}.yaml", [override])) == perplexity
