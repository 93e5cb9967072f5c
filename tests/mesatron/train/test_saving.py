"""What is saved behind training against what the whole layout held when the save began, to the bit.

The expected tensors are put together by collectives (saving.py); the save itself runs none. Most tensors do not divide
by the processes that share them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mesatron_data.synthetic import write_shards

from mesatron.checkpoint.verify import verify

SAVING = Path(__file__).with_name("saving.py")
BF16 = {"train.precision": "bf16"}
OFFLOAD = {"parallel.offload_optimizer": True}
EVEN = {"model.width": 24, "model.layers": 3, "model.heads": 4, "model.head_dim": 6, "model.mlp_ratio": 1.5}


def stages(*numbers: int, **others: Any) -> list[dict[str, Any]]:
    return [{"parallel.zero_stage": number} | others for number in numbers]


@pytest.fixture(scope="module")
def even_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences of 22 tokens, which context and sequence parallelism can halve; vocabulary 101."""
    return write_shards(tmp_path_factory.mktemp("even") / "shards", 101, 22, {"train": 64, "validation": 9}, seed=6)


@pytest.mark.parametrize(
    ("processes", "layout", "cases"),
    [
        (1, {}, stages(0, 1, 2, 3)),
        (3, {}, [*stages(0, 1, 2, 3), *stages(1, 2, 3, **BF16), *stages(1, 3, **OFFLOAD)]),
        (4, EVEN | {"parallel.tensor_size": 2}, [*stages(0, 1, 2, 3), *stages(1, **BF16)]),
        (2, EVEN | {"parallel.tensor_size": 2, "parallel.sequence_parallel": True}, stages(1)),
        (2, EVEN | {"parallel.pipeline_size": 2}, [*stages(1), *stages(1, **BF16)]),
        (4, EVEN | {"parallel.pipeline_size": 2, "parallel.tensor_size": 2}, stages(1)),
        (2, EVEN | {"parallel.context_size": 2}, stages(0, 1, 3)),
    ],
    ids=["alone", "DP3", "TP2xDP2", "TP2+SP", "PP2", "PP2xTP2", "CP2"],
)
def test_a_save_behind_training_holds_the_state_of_its_step(
    processes: int, layout: dict[str, Any], cases: list[dict[str, Any]], tmp_path: Path, odd_config: Callable,
    even_data: Path, world: Callable, run_of: Callable,
) -> None:  # fmt: skip
    settings = {"train.global_batch_size": 12, "train.micro_batch_size": 2} | layout
    configs = [odd_config(tmp_path / str(i), even_data, **settings | case) for i, case in enumerate(cases)]
    outcome = world(processes, SAVING, tmp_path, *configs)
    assert outcome.exit_code == 0, outcome.errors
    for number, (config, case) in enumerate(zip(configs, cases, strict=True)):
        run = run_of(config)
        verify(run.checkpoint(2))
        found = {f"weight/{name}": tensor for name, tensor in run.tensors(2).items()} | run.tensors(2, "optimizer")
        expected: dict[str, torch.Tensor] = {}
        for rank in range(processes):
            expected |= torch.load(tmp_path / f"{number}-{rank}.pt")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], tensor.cpu()), (case, name)
