"""After a step with non-finite gradients the log names the layer where they began, and its inputs are in a file.

The layer is told in every layout from faults that are in the weights or in one gradient; the file is replayed by the
command a person would use. Looking for the layer must not change what is trained afterwards.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mesatron.config import dump_config, load_stored_config
from mesatron.replay import replay

SABOTAGE = Path(__file__).with_name("sabotage.py")
WIDTHS = {"model.width": 24, "model.heads": 4, "model.head_dim": 6, "model.mlp_ratio": 1.5}
SETTINGS = WIDTHS | {"train.max_skipped_steps": 2, "checkpoint.every_steps": 2}


def place_in(run: Any) -> str:
    """What the decision of the first skipped step says of the place."""
    first, second = [record for record in run.attempts() if record["event"] == "decision"]
    assert (first["step"], second["step"]) == (3, 4)
    assert first["what"].startswith("the gradient is not finite, so the update is skipped (1 so far); ")
    return first["what"].partition("; ")[2]


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [(1, {"zero_stage": 0}), (2, {"zero_stage": 1}), (2, {"zero_stage": 3}), (2, {"tensor_size": 2}),
     (2, {"pipeline_size": 2})],
)  # fmt: skip
def test_a_weight_that_overflows(
    processes: int, parallel: dict[str, int], tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable,
    run_of: Callable,
) -> None:  # fmt: skip
    settings = SETTINGS | {f"parallel.{key}": value for key, value in parallel.items()}
    config = odd_config(tmp_path, short_data, **settings, **{"train.activation_checkpointing": "full"})
    run = run_of(config)
    outcome = world(processes, SABOTAGE, "weight=3", "train", config)
    assert outcome.exit_code == 5, outcome.errors
    rank = 1 if "pipeline_size" in parallel else 0
    file = run.path / f"nonfinite/step-00000003/rank-{rank:05d}.safetensors"
    place = f"non-finite numbers begin in the forward pass of blocks.1 in process {rank}, see mesatron replay {file}"
    assert place_in(run) == place
    assert list((run.path / "nonfinite").rglob("*.safetensors")) == [file]
    if processes == 1 or "tensor_size" in parallel:
        done = subprocess.run([sys.executable, "-m", "mesatron", "replay", str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        about, _, *lines = done.stdout.splitlines()
        assert about.startswith("layer blocks.1, direction forward, step 3, rank 0, sample_ids [")
        shown = {line.split("  ")[0]: int(line[: line.rindex("  ")].split()[-1]) for line in lines}
        assert shown["input"] == shown["mixer observes gamma"] == shown["mixer gives"] == shown["mlp_norm gives"] == 0
        assert shown["mlp gives"] > 0


@pytest.mark.parametrize("layer", ["embedding", "output"])
def test_the_layers_at_the_ends(layer: str, tmp_path: Path, odd_config: Callable, short_data: Path) -> None:
    """One row of the embedding is infinite, at either end; only what reads that row is not finite. The config is one
    that an earlier version let pass."""
    config = load_stored_config(odd_config(tmp_path, short_data, **{"train.micro_batch_size": 3}))
    weight = torch.ones(config.model.vocabulary_size, config.model.width)
    weight[5] = float("inf")
    tensors = {"parameter/embedding.weight": weight, "input": torch.tensor([[5, 7]])}
    if layer == "output":
        tensors |= {"parameter/norm.weight": torch.ones(config.model.width), "targets": torch.tensor([[5, 7]])}
        tensors["input"] = torch.ones(1, 2, config.model.width)
    about = {"layer": layer, "direction": "forward"}
    path = tmp_path / "layer.safetensors"
    save_file(tensors, path, {"config": dump_config(config), "about": json.dumps(about)})
    known, readings = replay(path)
    assert known == about
    found = {reading.name: reading.not_finite for reading in readings}
    if layer == "embedding":
        assert found["embedding gives"] == config.model.width
    else:
        assert found["norm gives"] == 0
        assert found["gradient of input"] > 0
    assert found["parameter/embedding.weight"] == config.model.width


@pytest.mark.parametrize(("processes", "parallel"), [(2, {"zero_stage": 2}), (3, {"zero_stage": 3})])
def test_a_gradient_that_overflows(
    processes: int, parallel: dict[str, int], tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable,
    run_of: Callable,
) -> None:  # fmt: skip
    settings = SETTINGS | {f"parallel.{key}": value for key, value in parallel.items()}
    config = odd_config(tmp_path, short_data, **settings, **{"train.global_batch_size": 12})
    outcome = world(processes, SABOTAGE, "gradient=3", "train", config)
    assert outcome.exit_code == 5, outcome.errors
    assert place_in(run_of(config)).startswith("non-finite numbers begin in the backward pass of blocks.1 in process 0")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_looking_for_the_layer_changes_nothing(
    stage: int, tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable, run_of: Callable
) -> None:
    runs = []
    for dump in (True, False):
        settings = {"parallel.zero_stage": stage, "train.dump_nonfinite": dump}
        config = odd_config(tmp_path / str(dump), short_data, **SETTINGS, **settings)
        outcome = world(2, SABOTAGE, "inf=3", "train", config)
        assert outcome.exit_code == 0, outcome.errors
        assert ("computed again, all activations and their gradients are finite" in outcome.output) == dump
        runs.append(run_of(config))
    assert runs[0].checksums(6) == runs[1].checksums(6)
    assert runs[0].curve("train/loss") == runs[1].curve("train/loss")
    assert json.loads((runs[0].checkpoint(6) / "state.json").read_text())["skipped_steps"] == 1
