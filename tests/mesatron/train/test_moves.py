"""A run that moves between layouts, against one that does not; and a resume that would go on with other weights.

What is saved by one layout and saved again by another without a step between has the same checksums, moments and all;
the curves of loss and gradient norm are those of one process that was never interrupted, to rounding.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from mesatron_data.synthetic import write_shards

from mesatron.checkpoint.format import MANIFEST, STATE, read_manifest, seal, to_json

SABOTAGE = Path(__file__).with_name("sabotage.py")
MODEL = {"model.width": 24, "model.layers": 3, "model.heads": 4, "model.head_dim": 6, "model.mlp_ratio": 1.5}
SETTINGS = MODEL | {"train.global_batch_size": 12, "train.micro_batch_size": 1, "train.epsilon": 1e-6}


@pytest.fixture(scope="module")
def even_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences of 22 tokens, which context and sequence parallelism can halve; vocabulary 101."""
    return write_shards(tmp_path_factory.mktemp("even") / "shards", 101, 22, {"train": 64, "validation": 9}, seed=6)


LEGS = [
    (4, {"tensor_size": 2, "zero_stage": 1}),
    (4, {"zero_stage": 2}),
    (4, {"pipeline_size": 2, "tensor_size": 2, "sequence_parallel": True}),
    (1, {}),
    (4, {"tensor_size": 2, "zero_stage": 3, "data_size": 2}),
    (2, {"context_size": 2}),
]


def test_one_run_through_six_layouts(
    tmp_path: Path, odd_config: Callable, even_data: Path, train: Callable, world: Callable, run_of: Callable,
    difference: Callable,
) -> None:  # fmt: skip
    settings = SETTINGS | {"train.steps": 2 * len(LEGS), "checkpoint.every_steps": 1, "checkpoint.keep_last": 99}
    whole = run_of(alone := odd_config(tmp_path / "whole", even_data, **settings))
    assert train(1, alone).exit_code == 0

    config = odd_config(tmp_path / "moving", even_data, **settings)
    moving = run_of(config)
    step = 0
    for processes, sizes in LEGS:
        overrides = [f"parallel.{key}={str(value).lower()}" for key, value in sizes.items()]
        if step:  # a step that changes nothing: what is saved after it is what was restored
            stop = f"--stop-at-step={step + 1}"
            outcome = world(processes, SABOTAGE, f"still={step + 1}", "train", config, *overrides, stop)
            assert outcome.exit_code == 75, outcome.errors
            assert moving.checksums(step + 1) == moving.checksums(step), sizes
            for leftover in moving.checkpoint(step + 1).iterdir():
                leftover.unlink()
            moving.checkpoint(step + 1).rmdir()
        step += 2
        outcome = train(processes, config, *overrides, f"--stop-at-step={step}")
        assert outcome.exit_code == (0 if step == settings["train.steps"] else 75), outcome.errors

    for tag in ("data/samples_checksum", "train/learning_rate", "train/tokens"):
        assert moving.curve(tag) == whole.curve(tag)
    for tag in ("train/loss", "train/grad_norm"):
        assert difference(moving.curve(tag), whole.curve(tag)) < 2e-5, tag
    for kind in ("weights", "optimizer"):
        expected = whole.tensors(step, kind)
        found = moving.tensors(step, kind)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


def test_other_weights_than_were_saved_end_the_run(
    tmp_path: Path, odd_config: Callable, even_data: Path, train: Callable, run_of: Callable
) -> None:
    """As after a conversion that moved nothing: every checksum is right, the loss is another."""
    config = odd_config(tmp_path, even_data, **SETTINGS, **{"train.steps": 4, "checkpoint.every_steps": 2})
    assert train(1, config, "--stop-at-step=2").exit_code == 75
    checkpoint = run_of(config).checkpoint(2)
    state = json.loads((checkpoint / STATE).read_text())
    saved = state["probe_loss"]
    state["probe_loss"] = saved * 1.001
    manifest = read_manifest(checkpoint)
    (checkpoint / STATE).write_bytes(data := to_json(state))
    manifest["files"][STATE] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / MANIFEST).write_bytes(seal(manifest))

    outcome = train(2, config, "parallel.tensor_size=2")
    assert outcome.exit_code == 4
    (line,) = outcome.error_lines
    words = rf"mesatron: {checkpoint} gives a loss of (\S+) on 8 held-out sequences, but {saved * 1.001} was saved"
    found = re.match(words, line)
    assert found
    assert float(found[1]) == pytest.approx(saved, rel=1e-6)
    outcome = train(2, config, "parallel.tensor_size=2", "--allow-changes")
    assert outcome.exit_code == 0, outcome.errors
    assert f"it was {saved * 1.001} when it was saved" in outcome.output


def test_the_tied_gradient_of_a_pipeline_in_bf16(
    tmp_path: Path, odd_config: Callable, even_data: Path, train: Callable, run_of: Callable
) -> None:
    """Both ends of the model count: without the output layer's part it would be off by a third."""
    moments = []
    for processes in (1, 2):
        config = odd_config(
            tmp_path / str(processes), even_data, **SETTINGS, **{"parallel.pipeline_size": processes},
            **{"train.steps": 1, "train.warmup_steps": 0, "train.precision": "bf16"},
        )  # fmt: skip
        outcome = train(processes, config)
        assert outcome.exit_code == 0, outcome.errors
        moments.append(run_of(config).tensors(1, "optimizer"))
    alone, piped = moments
    for name, moment in alone.items():
        assert (piped[name] - moment).norm() <= 0.01 * moment.norm(), name
