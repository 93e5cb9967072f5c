"""Scripts for Slurm: what an array of runs shares, and how many processes a job has."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mesatron.cluster.submission import Request, plan_array
from mesatron.config import load_config


def test_an_array_gets_its_signal_as_early_as_any_run_needs_it(
    tmp_path: Path, tiny_config: Callable[..., Path]
) -> None:
    file = tiny_config(tmp_path)
    leads = {"short": 77, "long": 300, "middle": 200}
    configs = [load_config(file, [f"name={name}", f"launch.lead_seconds={lead}"]) for name, lead in leads.items()]
    plan = plan_array(configs, tmp_path / "out", "array", Request({"nodes": "1"}, {}))
    assert "#SBATCH --signal=B:USR1@300\n" in plan.files[plan.script]
    assert "#SBATCH --signal=B:USR1@77\n" in plan.files[tmp_path / "runs/short/launch/train.sbatch"]


@pytest.mark.parametrize(("options", "processes"), [({}, 1), ({"gpus-per-node": "h100:4"}, 4), ({"gres": "gpu:0"}, 1)])
def test_a_process_for_each_gpu_or_one(
    options: dict[str, str], processes: int, tmp_path: Path, tiny_config: Callable[..., Path]
) -> None:
    config = load_config(tiny_config(tmp_path))
    assert Request({"nodes": "1"} | options, {}).processes_per_node(config) == processes
