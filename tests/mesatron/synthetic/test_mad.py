"""The auto-encoder's narrow place, what learns a task and what cannot, and `mesatron evaluate mad` as a person meets
it: files that a second call reads, a table with the paper's figures, mistakes in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mesatron.cli import app
from mesatron.errors import ConfigError
from mesatron.model.backbone import Backbone
from mesatron.synthetic.model import NoMixer, build, sinusoids
from mesatron.synthetic.paper import ACCURACIES, average
from mesatron.synthetic.tasks import Compression, InContextRecall, Memorisation, MultiQueryRecall, Task
from mesatron.synthetic.training import fit
from mesatron.synthetic.trials import Trial, comparison, markdown, plan, results, run, scores

CPU = torch.device("cpu")


def trial(task: Task, mixer: str = "mesa", epochs: int = 1, peak_lr: float = 3e-3) -> Trial:
    return Trial(task, mixer, epochs, peak_lr, weight_decay=0.1, seed=0, test_examples=64)


def model_of(a_trial: Trial) -> Backbone:
    return build(a_trial.task, a_trial.model(), a_trial.mixer != "none", seed=0).eval()


def said(model: Backbone, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.embedding(model.hidden(tokens))


def test_the_auto_encoder_sees_the_text_at_its_last_token_only() -> None:
    task = Compression(length=9)
    tokens = torch.from_numpy(task.generate(2, 0, "test").tokens)
    with_mixer, without = (said(model_of(trial(task, mixer)), tokens) for mixer in ("mesa", "none"))
    torch.testing.assert_close(without[0], without[1])  # the mark alone says nothing of the text
    assert (with_mixer[0] - with_mixer[1]).abs().amax(-1).min() > 1e-3, "what is said anywhere depends on the text"
    assert (with_mixer[:, 1:] - with_mixer[:, :-1]).abs().amax(-1).min() > 1e-3, "and on the place"
    model = model_of(trial(task))
    state = Backbone.hidden(model, tokens)[:, -1:].detach().requires_grad_()
    decoded = model.decoder(state + model.positions)
    torch.testing.assert_close(model.embedding(decoded), with_mixer)


def test_sinusoids_are_a_sine_and_a_cosine_of_each_wavelength() -> None:
    rows = sinusoids(50, 8).double()
    place = torch.arange(50).double()
    for i, length in enumerate((1.0, 10_000 ** (1 / 3), 10_000 ** (2 / 3), 10_000.0)):
        torch.testing.assert_close(rows[:, i], (place / length).sin(), atol=1e-6, rtol=0)
        torch.testing.assert_close(rows[:, 4 + i], (place / length).cos(), atol=1e-6, rtol=0)


def test_without_a_mixer_every_token_is_by_itself() -> None:
    task = InContextRecall(length=8)
    model = model_of(trial(task, "none"))
    assert all(isinstance(block.mixer, NoMixer) for block in model.blocks)
    tokens = torch.tensor([[1, 9, 1, 9, 2, 9, 1]])
    logits = said(model, tokens)[0]
    torch.testing.assert_close(logits[0], logits[6])
    torch.testing.assert_close(logits[1], logits[5])
    with_mixer = said(model_of(trial(task)), tokens)[0]
    assert (with_mixer[0] - with_mixer[6]).abs().max() > 1e-3


def test_mesa_learns_to_recall_and_a_model_without_mixer_cannot() -> None:
    """At chance one of two values is right; keys alone, without looking back, say no more."""
    task = InContextRecall(vocabulary_size=4, length=12, examples=1600)
    outcome = {mixer: run(trial(task, mixer, epochs=2), lambda line: None) for mixer in ("mesa", "none")}
    assert outcome["mesa"]["accuracy"] > 0.95
    assert outcome["none"]["accuracy"] < 0.65
    for result in outcome.values():
        assert result["steps"] == result["steps_planned"] == 100
        assert [step for step, _ in result["losses"]] == [50, 100]


def test_training_stops_before_a_gradient_that_is_not_finite() -> None:
    a_trial = trial(Compression(length=5, examples=320))
    model = model_of(a_trial)
    with torch.no_grad():
        model.decoder[1].weight[0, 0] = float("inf")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    steps = fit(model, a_trial.task.generate(320, 0, "train"), a_trial.train(), CPU, lambda step, loss: None)
    assert steps == 0
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_a_run_is_the_same_again() -> None:
    task = MultiQueryRecall(vocabulary_size=32, length=8, pairs=2, examples=70)
    first, again = (run(trial(task), print) for _ in range(2))
    assert first["losses"] == again["losses"]
    assert first["accuracy"] == again["accuracy"]
    assert first["steps"] == 3, "the last batch is the 6 that are left"


def test_optimization_is_the_papers() -> None:
    train = Trial(InContextRecall(), "mesa", 200, 1e-3, 0.01, 0, 1280).train()
    assert (train.steps, train.warmup_steps, train.weight_decay) == (80_000, 750, 0.01)
    assert (train.beta1, train.beta2, train.start_lr) == (0.9, 0.98, 1e-7)
    assert train.peak_lr * train.final_lr_fraction == pytest.approx(1e-5)
    assert Trial(Memorisation(), "mesa", 200, 1e-3, 0.1, 0, 1280).train().warmup_steps == 750
    assert trial(InContextRecall(examples=320)).train().warmup_steps == 5


def test_the_sweep_is_every_optimizer_for_every_setting() -> None:
    options: dict[str, Any] = {
        "epochs": None, "test_examples": None, "peak_lr": 1e-3, "weight_decay": 0.1, "seed": 0,
    }  # fmt: skip
    counts = {
        sweep: len(plan([Memorisation(), MultiQueryRecall()], ["mesa", "none"], sweep, **options))
        for sweep in ("none", "optimizer", "paper")
    }
    assert counts == {"none": 4, "optimizer": 32, "paper": 2 * 8 * (6 + 4)}
    with pytest.raises(ConfigError, match="--mixers has 'meesa'"):
        plan([Memorisation()], ["mesa", "meesa"], "none", **options)


def test_the_score_is_the_best_optimizers_mean_over_settings() -> None:
    def outcome(size: int, rate: float, share: float) -> tuple[Trial, dict[str, Any]]:
        return trial(Memorisation(vocabulary_size=size), peak_lr=rate), {"accuracy": share}

    outcomes = [outcome(256, 1e-3, 0.9), outcome(512, 1e-3, 0.3), outcome(256, 1e-4, 0.7), outcome(512, 1e-4, 0.7)]
    assert scores(outcomes) == {"mesa": {"memorisation": pytest.approx(70.0)}}


def test_the_papers_averages_come_out() -> None:
    printed = {
        "mamba2": 66.0, "gla": 72.0, "mlstm": 73.2, "deltanet": 67.7, "gated_deltanet": 71.0, "hawk": 64.5,
        "mesa": 76.1, "hawk_mesa": 73.5, "transformer": 75.8,
    }  # fmt: skip
    assert {mixer: average(row) for mixer, row in ACCURACIES.items()} == pytest.approx(printed, abs=0.051)
    rows = comparison({"mesa": {"memorisation": 12.34, "mqar": 5.0}, "none": {"mqar": 1.0}})
    assert rows == [
        ("mixer", "memorisation", "mqar", "MAD average"),
        ("mesa", "12.3", "5.0", ""),
        ("mesa, paper", "77.2", "", "76.1"),
        ("none", "", "1.0", ""),
    ]
    assert comparison({"mesa": {"mqar": 5.0}}) == [("mixer", "mqar", "MAD average"), ("mesa", "5.0", "")]
    assert markdown(rows).splitlines()[:3] == [
        "| mixer       | memorisation | mqar | MAD average |",
        "| ----------- | -----------: | ---: | ----------: |",
        "| mesa        |         12.3 |  5.0 |             |",
    ]  # fmt: skip


def mad(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "mesatron", "evaluate", "mad", *map(str, arguments)], capture_output=True, text=True,
        timeout=300, env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_results_are_written_once_and_shown_beside_the_papers(tmp_path: Path) -> None:
    options = ("--mixers", "none,mesa", "--tasks", "compression", "--length", "6", "--examples", "64", "--epochs", "2")
    done = mad("--output", tmp_path / "mad", *options, "--test-examples", "40", "--seed", "7")
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "mad").rglob("*.json"))
    assert [file.relative_to(tmp_path / "mad").parts[:2] for file in files] == [
        ("mesa", "compression"), ("none", "compression"),
    ]  # fmt: skip
    result = json.loads(files[0].read_text())
    assert result["settings"] == {
        "vocabulary_size": 16, "length": 6, "examples": 64, "epochs": 2, "peak_lr": 1e-3, "weight_decay": 0.1,
        "seed": 7, "test_examples": 40,
    }  # fmt: skip
    assert result["environment"]["packages"]["torch"] == torch.__version__
    assert [line.split("  ")[-1] for line in done.stdout.splitlines()[:2]] == [str(files[1]), str(files[0])]
    shown = (tmp_path / "mad/mad-table.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown]
    assert ["mesa", f"{100 * result['accuracy']:.1f}", ""] in cells
    assert ["mesa, paper", "45.4", "76.1"] in cells
    assert "Ours: compression 6 tokens of 16, 64 examples, 2 epochs; sweep none." in shown[-1]
    assert shown[-1] == done.stdout.splitlines()[-1]

    # Read, not made, by a second call; made anew when asked.
    (a_trial,) = plan([Compression(length=6, examples=64)], ["mesa"], "none", 2, 40, 1e-3, 0.1, 7)
    assert a_trial.file(tmp_path / "mad") == files[0]
    files[0].write_text(json.dumps(result | {"accuracy": 0.125}))
    assert next(results([a_trial], tmp_path / "mad", False, print))[1]["accuracy"] == 0.125
    assert next(results([a_trial], tmp_path / "mad", True, print))[1]["accuracy"] == result["accuracy"]
    assert json.loads(files[0].read_text())["losses"] == result["losses"]
    for broken in ("", "[]", '{"accuracy": 0.5}', json.dumps(result | {"accuracy": "high"})):
        files[0].write_text(broken)
        with pytest.raises(ConfigError, match=r"is no result of its training; remove it, or pass --overwrite"):
            next(results([a_trial], tmp_path / "mad", False, print))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--tasks", "fuzy-recall"), "--tasks has 'fuzy-recall', which is no task; did you mean fuzzy-recall?"),
        (("--tasks", "7"), "--tasks has '7', which is no task; there are in-context-recall, "),
        (("--tasks", "mqar,,compression"), "--tasks is 'mqar,,compression', which has an empty name; "),
        (("--mixers", "meesa"), "--mixers has 'meesa': "),
        (("--mixers", "mesa+gla+hawk"), "--mixers has 'mesa+gla+hawk', but mesa + gla + hawk = 3 mixers do not fit "),
    ],
)
def test_mistakes_are_refused(tmp_path: Path, arguments: tuple[str, ...], line: str) -> None:
    done = CliRunner().invoke(app, ["evaluate", "mad", "--output", str(tmp_path / "mad"), *arguments])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(line)
    assert not (tmp_path / "mad").exists()


SIZES = ("--epochs", "--examples", "--test-examples", "--length", "--vocabulary")
RATES = ("--learning-rate", "--weight-decay")


@pytest.mark.parametrize(
    ("option", "value"),
    [*((size, "9" * 20) for size in SIZES), *((rate, value) for rate in RATES for value in ("1e300", "inf", "nan"))],
)
def test_numbers_have_a_bound(tmp_path: Path, option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["evaluate", "mad", "--output", str(tmp_path / "mad"), option, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}'" in done.output
    assert not (tmp_path / "mad").exists()


def test_mistakes_end_in_one_line(tmp_path: Path) -> None:
    done = mad("--output", tmp_path, "--tasks", "mqar", "--length", "7")
    assert done.returncode == 2
    assert done.stderr == (
        "mesatron: mqar: a length of 7 has no room for 4 pairs and as many queries; take an even one from 16 on.\n"
    )
