"""Gates keep their precision when DeepSpeed casts every parameter to bf16.

Decay horizons 1 / (1 - gamma) under bf16 and each ZeRO stage against fp32 with the same weights. That steps, norms and
tensors are right at every stage is checked in train/test_layouts.py. And DeepSpeed takes the devices that we take.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

HORIZONS = Path(__file__).with_name("horizons.py")


def test_decay_horizons_under_bf16(tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable) -> None:
    horizons = {}
    for precision, stage in [("fp32", 1), ("bf16", 0), ("bf16", 1), ("bf16", 3)]:
        config = odd_config(
            tmp_path, short_data,
            **{"train.precision": precision, "parallel.zero_stage": stage, "train.micro_batch_size": 4},
        )  # fmt: skip
        outcome = world(2, HORIZONS, config, tmp_path / "gamma")
        assert outcome.exit_code == 0, outcome.errors
        gammas = torch.load(tmp_path / "gamma")
        horizons[precision, stage] = torch.cat([1 / (1 - gamma.double().flatten()) for gamma in gammas])
    exact = horizons.pop(("fp32", 1))
    assert exact.median() > 500
    for layout, horizon in horizons.items():
        assert ((horizon / exact - 1).abs() < 0.03).all(), layout


def test_deepspeed_takes_the_processor_where_no_gpu_is_seen() -> None:
    """Though a variable tells of one, and though another package has asked DeepSpeed before."""
    ask = "from deepspeed.accelerator import get_accelerator; get_accelerator()"
    look = "import mesatron.parallel.zero; print(get_accelerator().device_name(), get_accelerator().is_available())"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cuda"}
    command = [sys.executable, "-c", f"{ask}; {look}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cpu", "True"]
