"""A run that meets bad data goes back before it and leaves it out, then and in every later start.

The loss really rises: some global batches hold the tokens that are rare in all others. The run is compared with others
that are told what to leave out when they start, in the same layout and in another one.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

from mesatron.config.schema import TrainConfig
from mesatron.train.spikes import LEAST, SpikeDetector

SABOTAGE = Path(__file__).with_name("sabotage.py")
SETTINGS = {
    "train.steps": 52, "train.spike_sigma": 8, "train.spike_steps": 2, "checkpoint.every_steps": 10,
    "checkpoint.keep_last": 9, "train.peak_lr": 1e-2, "train.max_rewinds": 1,
}  # fmt: skip


def test_the_batches_of_a_spike_are_left_out(
    tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable, run_of: Callable, difference: Callable
) -> None:
    """Global batches 40 and 41 are bad: steps 41 and 42 are a spike, which is seen before step 43."""
    config = odd_config(tmp_path / "run", short_data, **SETTINGS)
    run = run_of(config)
    outcome = world(2, SABOTAGE, "garbage=40,41", "train", config)
    assert outcome.exit_code == 0, outcome.errors
    (decision,) = [record for record in run.attempts() if record["event"] == "decision"]
    assert decision["step"] == 42
    assert decision["what"].endswith(
        "since step 41: going back to step 30 (rewind 1 of at most 1) and leaving out the global batches 39 to 41, "
        f"whose sequences are listed in {run.path}/skipped-batches.json"
    )
    (rewind,) = json.loads((run.path / "skipped-batches.json").read_text())
    assert (rewind["first_step"], rewind["last_step"], rewind["to_step"]) == (41, 42, 30)
    assert 2 * 8 < len(rewind["sample_ids"]) <= 3 * 8  # an epoch ends after global batch 39
    assert run.steps() == [10, 20, 30, 40, 50, 52]
    assert len(run.curve("train/loss")) == 52
    assert run.curve("train/rewinds") == 30 * [0] + 22 * [1]
    assert max(run.curve("train/loss")[20:]) < 5

    # As after a kill right after the decision: from a checkpoint that knows nothing of it.
    for processes in (2, 4):
        config = odd_config(tmp_path / str(processes), short_data, **SETTINGS)
        other = run_of(config)
        shutil.copytree(run.path, other.path, symlinks=True)
        for step in (40, 50, 52):
            shutil.rmtree(other.checkpoint(step))
        outcome = world(processes, SABOTAGE, "garbage=40,41", "train", config)
        assert outcome.exit_code == 0, outcome.errors
        if processes == 2:
            other.assert_equals(run, 52)
        assert other.curve("data/samples_checksum") == run.curve("data/samples_checksum")
        assert difference(other.curve("train/loss"), run.curve("train/loss")) < 1e-4


def test_a_run_goes_back_only_so_often(
    tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable, run_of: Callable
) -> None:
    """Twice bad data, in a pipeline; what is known of losses outlives a restart between them."""
    settings = SETTINGS | {"model.width": 24, "model.heads": 4, "model.head_dim": 6, "parallel.pipeline_size": 2}
    config = odd_config(tmp_path, short_data, **settings)
    run = run_of(config)
    garbage = "garbage=30,31,32,41,42,43"
    outcome = world(2, SABOTAGE, garbage, "train", config, "--stop-at-step=35")
    assert outcome.exit_code == 75, outcome.errors
    outcome = world(2, SABOTAGE, garbage, "train", config)
    assert outcome.exit_code == 5, outcome.errors
    (line,) = outcome.error_lines
    assert "and the run has gone back 1 times; lower train.peak_lr, or raise train.max_rewinds" in line
    decisions = [record for record in run.attempts() if record["event"] == "decision"]
    assert ["going back to step 20" in decision["what"] for decision in decisions] == [True]
    assert run.attempts()[-1]["exit_code"] == 5


def test_a_run_does_not_go_back_to_its_beginning_for_want_of_checkpoints(
    tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable, run_of: Callable
) -> None:
    """The two that stay are those of the spike and of a stop right before it."""
    config = odd_config(tmp_path, short_data, **SETTINGS | {"checkpoint.keep_last": 2})
    run = run_of(config)
    outcome = world(2, SABOTAGE, "garbage=39,40", "train", config, "--stop-at-step=39")
    assert outcome.exit_code == 75, outcome.errors
    outcome = world(2, SABOTAGE, "garbage=39,40", "train", config)
    assert outcome.exit_code == 5, outcome.errors
    (line,) = outcome.error_lines
    assert "and no sound checkpoint of before step 39 is left; begin under another name" in line
    assert run.steps() == [39, 40]
    assert not (run.path / "skipped-batches.json").exists()


def test_what_counts_as_a_spike() -> None:
    train = TrainConfig(
        steps=99, global_batch_size=1, micro_batch_size=1, peak_lr=1.0, spike_sigma=5, spike_steps=3, warmup_steps=0
    )
    detector = SpikeDetector(train)
    losses = [5 - 0.1 * step + (0.05 if step % 2 else -0.05) for step in range(1, 31)]
    assert not any(detector.note(step, loss) for step, loss in enumerate(losses, start=1))
    # Down is no spike, nor are two steps; the third step up in a row is, and so is one that is no number.
    up = [1.0, 3.0, 3.0, 1.7, 3.0, float("nan"), 3.0, 3.0]
    found = [detector.note(step, loss) for step, loss in enumerate(up, start=31)]
    assert found == [None, None, None, None, None, None, 35, 35]
    assert detector.recent == [*losses, 1.0, 1.7]
    assert SpikeDetector(train, detector.recent).note(39, 9.0) is None
    fresh = SpikeDetector(train)
    assert not any(fresh.note(step, 5.0 + step) for step in range(1, LEAST + 1))
    # Losses that are no numbers are no trend: at the beginning a run has other means against them.
    bad = SpikeDetector(train)
    assert not any(bad.note(step, loss) for step, loss in enumerate([math.nan, math.inf, -math.inf, *losses], start=1))
    assert bad.recent == losses
