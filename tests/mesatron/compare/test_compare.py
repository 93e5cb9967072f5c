"""A comparison of two tiny variants by the real command: killed, interrupted and called again; then its table, plots
and TensorBoard files against the metrics.jsonl and the evaluations they come from."""

import csv
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from mesatron.compare.plots import curves, position_bounds, positions, speed
from mesatron.compare.results import Result, read_results
from mesatron.compare.variants import Comparison, load_comparison
from mesatron.monitor.attempts import read_attempts
from mesatron.monitor.metrics import read_metrics

STEPS, EVERY = 24, 4
MIXERS = {"fine": "mesa", "gla": "gla"}
VARIANTS = {"fine": {}, "gla": {"model.mixer": "gla"}}
WAIT_SECONDS = 90


class Command:
    """`mesatron compare FILE` in a process group of its own, as a shell starts it."""

    def __init__(self, file: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mesatron", "compare", str(file), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def child_at(self, run: Path, step: int) -> psutil.Process:
        """The training under way once a run has saved a step or a later one."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            children = psutil.Process(self.process.pid).children()
            saved = [int(path.parent.name[5:]) for path in run.glob("checkpoints/step-*/manifest.json")]
            if children and max(saved, default=0) >= step:
                return children[0]
            time.sleep(0.01)

    def end(self) -> tuple[int, str, str]:
        """Exit code and what was printed."""
        out, errors = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, out, errors


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    tiny_config(
        folder, **{
            "train.steps": STEPS, "checkpoint.every_steps": EVERY, "evaluate.every_steps": STEPS,
            "evaluate.micro_batch_size": 64, "monitor.histogram_every_steps": 1000, "model.layers": 1,
        }
    )  # fmt: skip
    path = folder / "comparison.yaml"
    path.write_text(
        yaml.safe_dump(
            {"base": "config.yaml", "output": str(folder / "out"), "variants": VARIANTS, "processes": 2},
            sort_keys=False,
        )
    )
    return path


@pytest.fixture(scope="module")
def finished(file: Path) -> Comparison:
    """The comparison after a kill of a training, a kill of the comparison, Ctrl-C, and one call to the end."""
    comparison = load_comparison(file)
    fine, gla = (variant.config.run_folder for variant in comparison.variants)

    command = Command(file)
    command.child_at(fine, EVERY).kill()
    code, out, errors = command.end()
    assert code == 10, errors
    assert errors.splitlines()[-1].startswith("mesatron: Not finished: fine (ended by SIGKILL); ")
    assert "| gla " in out
    assert "| fine " not in out
    assert not (comparison.output / "positions.png").exists()

    command = Command(file)
    command.child_at(fine, EVERY)
    other = Command(file).end()
    assert other[0] == 2
    assert "Another comparison is at work in" in other[2]
    child = command.child_at(fine, 2 * EVERY)
    command.process.kill()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()
    assert command.end()[0] == -signal.SIGKILL

    command = Command(file)
    command.child_at(fine, 4 * EVERY)
    os.killpg(command.process.pid, signal.SIGINT)
    code, _, errors = command.end()
    assert code == 130
    assert "Traceback" not in errors

    code, out, errors = Command(file).end()
    assert code == 0, errors
    assert "gla: finished before" in out
    starts = [record for record in read_attempts(fine / "attempts.jsonl") if record["event"] == "start"]
    assert [start["resumed_from"] is not None for start in starts] == [False, True, True, True]
    assert len([record for record in read_attempts(gla / "attempts.jsonl") if record["event"] == "start"]) == 1
    return comparison


@pytest.fixture(scope="module")
def results(finished: Comparison) -> list[Result]:
    return read_results(finished)


def test_results_are_those_of_the_runs(finished: Comparison, results: list[Result]) -> None:
    assert [result.name for result in results] == ["fine", "gla"]
    for variant, result in zip(finished.variants, results, strict=True):
        lines = read_metrics(variant.config.run_folder / "metrics.jsonl")
        training = [line for line in lines if "train/loss" in line]
        assert result.train_loss == [(step, training[step - 1]["train/loss"]) for step in range(1, STEPS + 1)]
        assert [step for step, _ in result.validation_loss] == [0, STEPS]
        speeds = [line["train/tokens_per_second"] for line in training[STEPS // 2 :]]
        assert result.tokens_per_second == statistics.median(speeds)
        assert result.peak_bytes == max(line["memory/peak_bytes"] for line in training)
        assert result.parameters == variant.config.model.parameter_count()
        assert result.tokens_trained == training[-1]["train/tokens"]
        evaluated = json.loads((variant.config.run_folder / "eval/perplexity.json").read_text())
        assert result.loss == pytest.approx(lines[-1]["validation/loss"], rel=0.05)  # that of 16 sequences
        assert (result.perplexity, result.loss_by_source) == (evaluated["perplexity"], evaluated["loss_by_source"])


def test_differences_are_weighted_by_tokens(results: list[Result]) -> None:
    fine, gla = results
    assert fine.tokens_by_position == gla.tokens_by_position
    difference = gla.difference(fine)
    assert difference == [own - other for own, other in zip(gla.loss_by_position, fine.loss_by_position, strict=True)]
    assert set(fine.difference(fine)) == {0.0}
    whole = gla.mean_difference(fine, 0, len(difference))
    assert whole == pytest.approx(gla.loss - fine.loss, abs=1e-9)
    assert any(difference)


def test_the_table_is_that_of_the_results(finished: Comparison, results: list[Result]) -> None:
    with (finished.output / "results.csv").open() as table:
        rows = list(csv.DictReader(table))
    text = (finished.output / "results.md").read_text()
    length = len(results[0].loss_by_position)
    for row, result in zip(rows, results, strict=True):
        assert (row["variant"], row["mixer"], int(row["parameters"])) == (
            result.name, MIXERS[result.name], result.parameters,
        )  # fmt: skip
        assert (float(row["loss"]), float(row["perplexity"])) == (result.loss, result.perplexity)
        assert float(row["tokens_per_second"]) == result.tokens_per_second
        assert float(row["peak_memory_bytes"]) == result.peak_bytes
        last = result.mean_difference(results[0], 3 * length // 4, length)
        assert float(row["difference_last_quarter"]) == last
        assert {key: float(row[f"loss/{key}"]) for key in result.loss_by_source} == result.loss_by_source
        assert row["paper_perplexity"] == ""
        (line, _) = (line for line in text.splitlines() if line.startswith(f"| {result.name} "))
        assert f" {result.perplexity:.2f} " in line
        assert f" {last:+.4f} " in line
    assert "paper" not in text


def test_the_plots_show_the_results(finished: Comparison, results: list[Result]) -> None:
    training, validation = curves(results, results[0]).axes
    for axes, name in ((training, "train_loss"), (validation, "validation_loss")):
        for line, result in zip(axes.lines, results, strict=True):
            tokens_per_step = result.tokens_trained // STEPS
            points = [(step * tokens_per_step, loss) for step, loss in getattr(result, name)]
            assert [tuple(point) for point in line.get_xydata()] == points
    (axes,) = positions(results, results[0]).axes
    (_, line) = axes.lines
    bounds = position_bounds(len(results[0].loss_by_position))
    assert len(line.get_xydata()) == len(bounds) - 1
    assert line.get_xydata()[0] == pytest.approx([1, results[1].difference(results[0])[0]])
    (axes,) = speed(results, results[0]).axes
    assert [tuple(line.get_xydata()[0]) for line in axes.lines] == [
        (r.tokens_per_second, r.perplexity) for r in results
    ]
    for name in ("curves", "positions", "speed"):
        assert imread(finished.output / f"{name}.png").std() > 0.05


def test_position_bounds_cover_every_position_once() -> None:
    assert position_bounds(1) == [0, 1]
    bounds = position_bounds(2048)
    assert (bounds[0], bounds[-1]) == (0, 2048)
    assert bounds == sorted(set(bounds))
    assert {1, 2, 4, 1024} <= set(bounds)
    assert position_bounds(300)[-2:] == [256, 300]


def test_tensorboard_shows_the_same_curves(finished: Comparison, results: list[Result]) -> None:
    for result in results:
        (path,) = (finished.output / "tensorboard" / result.name).iterdir()
        found: dict[str, list[tuple[int, float]]] = {}
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
        expected: dict[str, list[tuple[int, Any]]] = {
            "train/loss": result.train_loss, "validation/loss": result.validation_loss,
            "position/loss": list(enumerate(result.loss_by_position)),
            "position/difference": list(enumerate(result.difference(results[0]))),
            "compare/perplexity": [(STEPS, result.perplexity)],
            "compare/tokens_per_second": [(STEPS, result.tokens_per_second)],
            "compare/peak_memory_bytes": [(STEPS, result.peak_bytes)],
        }  # fmt: skip
        assert found.keys() == expected.keys()
        for tag, points in expected.items():
            assert found[tag] == [(step, pytest.approx(value, rel=1e-6, abs=1e-9)) for step, value in points], tag


def test_a_second_call_trains_nothing(file: Path, finished: Comparison) -> None:
    """And leaves what somebody else put beside the curves."""
    own = finished.output / "tensorboard/own/notes"
    own.parent.mkdir()
    own.touch()
    kept = [path for path in (finished.output / "runs").rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in kept}
    table = (finished.output / "results.csv").read_bytes()
    code, out, _ = Command(file).end()
    assert code == 0
    assert out.startswith("fine: finished before\ngla: finished before\n")
    assert {path: path.stat().st_mtime_ns for path in kept} == before
    assert (finished.output / "results.csv").read_bytes() == table
    assert own.exists()


def test_other_settings_for_what_is_finished_are_refused(file: Path, finished: Comparison) -> None:
    code, out, errors = Command(file, "train.peak_lr=1e-3").end()
    assert (code, out) == (2, "")
    assert errors.startswith(f"mesatron: {finished.output}/runs/fine was trained with other settings than {file} has")
    assert "(train.peak_lr: 0.003 -> 0.001)" in errors
    one = file.with_name("one-process.yaml")
    one.write_text(file.read_text().replace("processes: 2", "processes: 1"))
    code, _, errors = Command(one).end()
    assert code == 2
    assert "(processes: 2 -> 1)" in errors
    code, _, errors = Command(file, "--sbatch=nodes=1").end()
    assert code == 2
    assert "give --slurm too" in errors
    code, _, errors = Command(file, "--slurm").end()
    assert code == 2
    assert "are trained; leave out --slurm to measure them" in errors


def test_variants_on_different_data_are_refused(file: Path, finished: Comparison) -> None:
    """Whether the checkpoint says so or, where it was removed, the measurement; and for one that is to be trained."""
    fine, gla = (variant.config.run_folder for variant in finished.variants)
    checkpoint, measured = gla / f"checkpoints/step-{STEPS:08d}", gla / "eval/perplexity.json"
    state, kept = checkpoint / "state.json", gla.with_name("kept")
    texts = {path: path.read_text() for path in (state, measured)}
    fingerprint = json.loads(texts[measured])["data_fingerprint"]
    for path, text in texts.items():
        path.write_text(text.replace(fingerprint, "f" * 64))

    def refusal() -> str:
        code, out, errors = Command(file).end()
        assert (code, out) == (3, "")
        return errors

    expected = f"{fine} was trained on {fingerprint[:12]}, but {gla} was trained on {'f' * 12}; prepare the data again"
    assert expected in refusal()
    checkpoint.rename(kept)
    assert expected in refusal()
    kept.rename(checkpoint)
    fine.rename(kept)
    folder = finished.variants[0].config.data.folder
    assert f"{folder} now holds {fingerprint[:12]}, but {gla} was trained on {'f' * 12}; " in refusal()
    kept.rename(fine)
    for path, text in texts.items():
        path.write_text(text)
    assert Command(file).end()[0] == 0


def test_a_folder_of_something_else_is_left_alone(file: Path, tmp_path: Path) -> None:
    (tmp_path / "results.md").write_text("mine")
    other = file.with_name("elsewhere.yaml")
    other.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"output": str(tmp_path)}))
    for option in ([], ["--slurm"]):
        code, _, errors = Command(other, *option).end()
        assert code == 2
        assert f"{tmp_path} holds files of something else" in errors
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("results.md", "mine")]


def test_only_the_last_step_is_measured_and_jobs_train_their_own(finished: Comparison, file: Path) -> None:
    """One variant's last checkpoint is damaged, an older one is not; jobs have begun the other and not finished it."""
    fine, gla = (variant.config.run_folder for variant in finished.variants)
    for run in (fine, gla):
        (run / "eval/perplexity.json").unlink()
    weights = next((fine / f"checkpoints/step-{STEPS:08d}").glob("weights-*"))
    content = bytearray(weights.read_bytes())
    content[-10] ^= 1
    weights.write_bytes(content)
    shutil.rmtree(gla / f"checkpoints/step-{STEPS:08d}")
    (gla / "launch").mkdir()
    code, _, errors = Command(file).end()
    assert code == 10
    assert "is damaged: tensor" in errors
    line = errors.splitlines()[-1]
    assert "fine (exit code 4), gla (its job has not finished it; --slurm submits it again); see above why" in line
    assert not (gla / f"checkpoints/step-{STEPS:08d}").exists()
