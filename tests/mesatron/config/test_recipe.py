"""The shipped paper configs against the paper's numbers (arXiv 2506.05233, sections 4, G.1-G.6, tables 8 and 9) and
against the table they are written from, and computed parameter counts against models that are really built."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mesatron.config import Config, ModelConfig, load_config
from mesatron.config.paper import PEAK_LR as PAPER_LR
from mesatron.config.paper import config_texts, run_name
from mesatron.model.backbone import Backbone

PAPER = Path(__file__).parents[3] / "configs/paper"
# name: width, layers, heads, millions of parameters
SIZES = {"140m": (768, 14, 6, 146.2), "440m": (1024, 28, 8, 433.9), "1b": (1536, 28, 12, 937.5)}
PEAK_LR = {
    ("140m", "15b"): 3e-3, ("140m", "50b"): 9.5e-4, ("440m", "15b"): 2.5e-3, ("440m", "50b"): 1e-3,
    ("1b", "15b"): 2e-3, ("1b", "50b"): 8.5e-4,
}  # fmt: skip


def built_parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Backbone(model).parameters())


def paper(size: str, tokens: str) -> Config:
    return load_config(PAPER / f"mesanet-{size}-{tokens}.yaml")


def test_every_size_and_budget_is_shipped() -> None:
    assert {path.stem for path in PAPER.glob("mesanet-*")} == {f"mesanet-{size}-{tokens}" for size, tokens in PEAK_LR}


@pytest.mark.parametrize("tokens", ["15b", "50b"])
@pytest.mark.parametrize("size", SIZES)
def test_size_and_learning_rate(size: str, tokens: str) -> None:
    config = paper(size, tokens)
    width, layers, heads, millions = SIZES[size]
    assert (config.model.width, config.model.layers, config.model.heads) == (width, layers, heads)
    assert config.model.mlp_width == 3 * width
    assert config.model.parameter_count() == built_parameters(config.model)
    assert config.model.parameter_count() == pytest.approx(millions * 1e6, rel=1e-3)
    assert config.train.peak_lr == PEAK_LR[size, tokens]
    assert config.name == f"mesanet-{size}-{tokens}"


def test_files_are_those_of_the_table() -> None:
    for name, text in config_texts().items():
        assert (PAPER / name).read_text() == text
    shipped = {path.name for path in PAPER.glob("*.yaml")} - {"recipe.yaml"}
    assert shipped == config_texts().keys()


@pytest.mark.parametrize("arguments", [[], ["no-folder"], [".", "."]])
def test_the_table_is_written_into_a_folder_that_is_named(tmp_path: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "mesatron.config.paper", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("mesatron: Name the folder [^\n]*\n", done.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", SIZES)
def test_mixers_have_as_many_parameters(size: str) -> None:
    """Within 1 % of each other, in all of them."""
    counts = {}
    for mixer in PAPER_LR:
        model = load_config(PAPER / f"{run_name(mixer, size, '15b')}.yaml").model
        assert model.mixer == mixer
        assert model.parameter_count() == built_parameters(model), mixer
        counts[mixer] = model.parameter_count()
    assert max(counts.values()) <= 1.01 * min(counts.values()), counts


@pytest.mark.parametrize(
    ("mixer", "run", "peak_lr"),
    [
        ("transformer", "140m-50b", 3e-3), ("mamba2", "1b-50b", 9e-4), ("gla", "440m-50b", 9.5e-4),
        ("mlstm", "440m-15b", 3e-3), ("deltanet", "440m-50b", 8.5e-4), ("gated-deltanet", "140m-15b", 1e-3),
        ("hawk", "1b-15b", 2e-3), ("hawk-mesa", "1b-50b", 8.5e-4), ("swa-1024", "440m-15b", 1e-3),
    ],
)  # fmt: skip
def test_learning_rates_of_other_mixers(mixer: str, run: str, peak_lr: float) -> None:
    assert load_config(PAPER / f"{mixer}-{run}.yaml").train.peak_lr == peak_lr


@pytest.mark.parametrize(("tokens", "budget"), [("15b", 15e9), ("50b", 50e9)])
@pytest.mark.parametrize("size", SIZES)
def test_recipe(size: str, tokens: str, budget: float) -> None:
    config = paper(size, tokens)
    model, mesa, train = config.model, config.model.mesa, config.train
    assert (model.vocabulary_size, model.head_dim, model.mixer, model.logit_cap) == (50257, 128, "mesa", 30)
    assert (mesa.gamma_cap, mesa.lambda_lower_bound, mesa.lambda_initial) == (0.9975, 0.25, 1)
    assert (mesa.convolution_width, mesa.solver_steps) == (4, 30)
    assert (config.data.context_length, train.global_batch_size) == (2048, 256)
    assert config.tokens_per_step == 524_288
    assert abs(train.steps - budget / config.tokens_per_step) < 1
    assert (train.beta1, train.beta2, train.epsilon, train.weight_decay) == (0.9, 0.98, 1e-8, 0.1)
    assert (train.schedule, train.start_lr, train.warmup_steps, train.final_lr_fraction) == ("cosine", 1e-6, 2000, 0.1)
    assert (train.clip_grad_norm, train.precision) == (1, "bf16")


@pytest.mark.parametrize(
    "shape",
    [
        {"vocabulary_size": 50257, "width": 6, "layers": 1, "heads": 3, "head_dim": 2},
        {"vocabulary_size": 11, "width": 35, "layers": 3, "heads": 5, "head_dim": 7, "mlp_ratio": 1.3},
        {"vocabulary_size": 7, "width": 9, "layers": 2, "heads": 1, "head_dim": 9, "mesa": {"convolution_width": 1}},
        *(
            {"vocabulary_size": 11, "width": 35, "layers": 5, "heads": 5, "head_dim": 7, "mixer": mixer}
            for mixer in (*PAPER_LR, ["hawk_mesa", "swa-3"])
        ),
        {"vocabulary_size": 1, "width": 1, "layers": 1, "heads": 1, "head_dim": 1, "mesa": {"convolution_width": 9}},
    ],
)
def test_parameter_count_is_that_of_the_built_model(shape: dict) -> None:
    model = ModelConfig.model_validate(shape)
    assert model.parameter_count() == built_parameters(model)
