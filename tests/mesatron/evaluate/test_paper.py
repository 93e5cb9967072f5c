"""Which runs the paper's figures are shown for."""

from pathlib import Path

import pytest

from mesatron.config import load_config
from mesatron.config.paper import PEAK_LR, RUNS, run_name
from mesatron.evaluate.paper import PERPLEXITIES, paper_perplexity

PAPER = Path(__file__).parents[3] / "configs/paper"


def test_every_shipped_run_of_the_paper_has_its_figure() -> None:
    for size, tokens in RUNS:
        for mixer in PEAK_LR:
            config = load_config(PAPER / f"{run_name(mixer, size, tokens)}.yaml")
            assert paper_perplexity(config) == PERPLEXITIES[size, tokens].get(mixer), config.name


@pytest.mark.parametrize(
    ("name", "overrides", "perplexity"),
    [
        ("mesanet-140m-15b", ["train.seed=1"], 17.02),
        ("mesanet-440m-50b", ["model.implementation=torch", "model.mesa.chunk_size=32"], 12.34),
        ("mesanet-1b-50b", ["train.steps=95000"], 10.83),
        ("mesanet-1b-50b", ["model.mixer=[mesa]"], 10.83),
        ("mesanet-1b-50b", ["model.mixer=[hawk, mesa]"], 10.78),
        ("mesanet-1b-50b", ["model.mixer=[mesa, hawk]"], None),
        ("mesanet-1b-50b", ["model.mixer=swa-64"], 12.37),
        ("mesanet-1b-50b", ["model.mixer=swa", "model.swa.window=64"], 12.37),
        ("mesanet-1b-50b", ["train.steps=90000"], None),
        ("mesanet-1b-50b", ["data.context_length=1024", "train.steps=190734"], None),
        ("mesanet-1b-50b", ["model.layers=27"], None),
        ("mesanet-1b-50b", ["model.vocabulary_size=32000"], None),
        ("mesanet-1b-50b", ["model.heads=24", "model.head_dim=64"], None),
        ("mesanet-1b-50b", ["model.mlp_ratio=1"], None),
        ("mesanet-1b-50b", ["model.mesa.solver_steps=5"], None),
        ("mesanet-1b-50b", ["model.mesa.solver_tolerance=0.5"], None),
        ("hawk-mesa-1b-50b", ["model.mesa.solver_steps=5"], None),
        ("hawk-1b-50b", ["model.mesa.solver_steps=5"], 11.24),
    ],
)
def test_only_runs_like_the_paper_s_have_a_figure_beside_them(
    name: str, overrides: list[str], perplexity: float | None
) -> None:
    assert paper_perplexity(load_config(PAPER / f"{name}.yaml", overrides)) == perplexity
