"""A run that was interrupted equals one that was not.

In the same layout on CPUs every tensor and figure is compared bit for bit; in another layout the next losses are
compared within rounding. The data set has 5 steps an epoch, so that runs cross epoch ends.
"""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesatron.errors import PeerLostError

SABOTAGE = Path(__file__).with_name("sabotage.py")


@pytest.mark.parametrize(
    ("processes", "special", "cuts"),
    [
        (1, {"train.schedule": "wsd"}, ["stop=5", "kill=8", "stop=12"]),
        (2, {"train.schedule": "cosine"}, ["kill=2", "kill=7", "stop=10", "stop=11"]),
        (2, {"train.precision": "bf16", "parallel.zero_stage": 2}, ["stop=5"]),
        (3, {"train.precision": "bf16", "parallel.zero_stage": 3, "train.global_batch_size": 6}, ["stop=5"]),
    ],
)
def test_a_run_cut_anywhere_equals_one_never_cut(
    processes: int, special: dict[str, Any], cuts: list[str], tmp_path: Path, odd_config: Callable, short_data: Path,
    train: Callable, world: Callable, run_of: Callable,
) -> None:  # fmt: skip
    """Stops at an epoch's end and beside it; kills inside an accumulation window, steps after the last checkpoint."""
    settings = {
        "train.steps": 13, "checkpoint.every_steps": 3, "train.global_batch_size": 8, "evaluate.every_steps": 4,
        "monitor.histogram_every_steps": 2,
    } | special  # fmt: skip
    whole = odd_config(tmp_path / "whole", short_data, **settings)
    assert train(processes, whole).exit_code == 0
    config = odd_config(tmp_path / "cut", short_data, **settings)
    for cut in cuts:
        fault, step = cut.split("=")
        if fault == "stop":
            outcome = train(processes, config, f"--stop-at-step={step}")
            assert outcome.exit_code == 75, outcome.errors
            assert outcome.error_lines == [
                f"mesatron: Stopped as asked after step {step} of 13, which is saved; the same command without "
                "--stop-at-step goes on from there."
            ]
        else:
            outcome = world(processes, SABOTAGE, cut, "train", config)
            assert set(outcome.exit_codes) <= {-signal.SIGKILL, PeerLostError.exit_code}
    assert train(processes, config).exit_code == 0
    run_of(config).assert_equals(run_of(whole), 13)
    reasons = [record["exit_code"] for record in run_of(config).attempts() if record["event"] == "end"]
    assert reasons[-1] == 0
    assert len(reasons) == len(cuts) + 1

    again = train(processes, config)
    assert again.exit_code == 0
    assert again.output == f"{run_of(config).path} is complete: step 13 of 13 is saved.\n"


def test_a_run_goes_on_in_any_layout(
    tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable, world: Callable, run_of: Callable,
    difference: Callable,
) -> None:  # fmt: skip
    """Saved by 2 processes under ZeRO-1; resumed by 1, 4, 2 and 3 under other stages; saved again as it was."""
    settings = {
        "train.steps": 9, "train.global_batch_size": 12, "train.micro_batch_size": 1, "checkpoint.every_steps": 4,
        "checkpoint.keep_last": 9,
    }  # fmt: skip
    config = odd_config(tmp_path / "whole", short_data, **settings)
    assert train(2, config).exit_code == 0
    whole = run_of(config)
    for processes, stage in [(1, 2), (4, 3), (2, 0), (3, 1)]:
        config = odd_config(tmp_path / f"{processes}-{stage}", short_data, **settings, **{"parallel.zero_stage": stage})
        run = run_of(config)
        shutil.copytree(whole.path, run.path, symlinks=True)
        for later in (8, 9):
            shutil.rmtree(run.checkpoint(later))
        outcome = world(processes, SABOTAGE, "still=5", "train", config, "--stop-at-step=5")
        assert outcome.exit_code == 75, outcome.errors
        assert f"Changed since that checkpoint: parallel.zero_stage: 1 -> {stage}." in outcome.output or stage == 1
        assert run.checksums(5) == whole.checksums(4), (processes, stage)
        shutil.rmtree(run.checkpoint(5))

        outcome = train(processes, config)
        assert outcome.exit_code == 0, outcome.errors
        assert run.curve("data/samples_checksum") == whole.curve("data/samples_checksum")
        for tag in ("train/loss", "train/grad_norm"):
            assert difference(run.curve(tag), whole.curve(tag)) < 1e-5, (processes, stage, tag)
