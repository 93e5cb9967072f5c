"""CUDA graphs of blocks: trained with them and without, over a validation and a resume, everything is the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mesatron.errors import StoppedEarly

GPUS = torch.cuda.device_count()
MODEL = {
    "model.width": 128, "model.heads": 2, "model.head_dim": 64, "train.precision": "bf16", "monitor.log_every_steps": 1,
}  # fmt: skip


def processes(number: int, **parallel: Any) -> Any:
    reason = "needs a GPU" if number == 1 else f"needs {number} GPUs"
    settings = {key.replace("__", "."): value for key, value in parallel.items()}
    return pytest.param(number, settings, marks=pytest.mark.skipif(number > GPUS, reason=reason), id=str(settings))


@pytest.mark.parametrize(
    ("number", "settings"),
    [
        processes(1),
        processes(1, train__precision="fp32"),
        processes(1, parallel__zero_stage=2),
        processes(1, parallel__offload_optimizer=True),
        processes(1, train__activation_checkpointing="selective"),
        processes(1, model__mixer=["hawk", "mesa"]),
        processes(2),
        processes(2, parallel__zero_stage=2),
        processes(2, parallel__tensor_size=2),
        processes(2, parallel__tensor_size=2, parallel__sequence_parallel=True),
        processes(2, parallel__context_size=2),
        processes(2, parallel__pipeline_size=2),
        processes(4, parallel__tensor_size=2, parallel__context_size=2, parallel__sequence_parallel=True),
        processes(4, parallel__tensor_size=2, parallel__pipeline_size=2),
    ],
)
def test_graphs_change_nothing(
    train: Callable, tiny_config: Callable, run_of: Callable, tmp_path: Path, number: int, settings: dict[str, Any]
) -> None:
    runs = []
    for graphs in (False, True):
        config = tiny_config(tmp_path / str(graphs), **MODEL | settings | {"train.cuda_graphs": graphs})
        assert train(number, config, "--stop-at-step", 4).exit_code == StoppedEarly.exit_code
        resumed = train(number, config)
        assert resumed.exit_code == 0, resumed.errors
        assert ("blocks as CUDA graphs" in resumed.output + resumed.errors) == graphs
        runs.append(run_of(config))
    without, with_graphs = runs
    with_graphs.assert_equals(without, 6)
    for line, other in zip(without.lines(), with_graphs.lines(), strict=True):
        seen = {tag: value for tag, value in line.items() if tag.startswith(("solver/", "validation/"))}
        assert seen == {tag: other[tag] for tag in seen}


def test_graphs_need_a_gpu(train: Callable, tiny_config: Callable, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **{"train.cuda_graphs": True})
    refused = train(1, config, environment={"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cuda"})
    assert refused.exit_code == 2
    assert refused.error_lines == ["mesatron: train.cuda_graphs needs a GPU; set it to false."]


@pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
def test_a_block_that_waits_for_the_host_cannot_be_recorded(
    train: Callable, tiny_config: Callable, tmp_path: Path
) -> None:
    torch_form = {"model.mesa.implementation": "torch", "train.cuda_graphs": True}
    refused = train(1, tiny_config(tmp_path, **MODEL | torch_form))
    assert refused.exit_code == 2
    assert "A block does what no CUDA graph can hold" in refused.errors
