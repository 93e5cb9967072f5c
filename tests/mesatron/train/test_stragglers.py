"""A process that computes more slowly than the others is named, and none of those that wait for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesatron.monitor.stragglers import READINGS, Stragglers

SABOTAGE = Path(__file__).with_name("sabotage.py")
PIPELINE = {"parallel.pipeline_size": 2, "model.width": 24, "model.heads": 4, "model.head_dim": 6}


@pytest.mark.parametrize(("processes", "special"), [(3, {"train.global_batch_size": 6}), (2, PIPELINE)])
def test_the_slow_process_is_named(
    processes: int, special: dict[str, Any], tmp_path: Path, odd_config: Callable, short_data: Path, world: Callable,
    run_of: Callable,
) -> None:  # fmt: skip
    config = odd_config(tmp_path, short_data, **{"train.steps": READINGS + 2, "monitor.straggler_ratio": 3} | special)
    outcome = world(processes, SABOTAGE, "lag=20", "train", config)
    assert outcome.exit_code == 0, outcome.errors
    (line,) = [line for line in outcome.output.splitlines() if " is slow" in line]
    assert line.startswith(f"step {READINGS}: process {processes - 1} on ")
    assert run_of(config).curve("time/slowest_process") == (READINGS + 2) * [processes - 1]
    assert min(run_of(config).curve("time/slowest_over_median")) > 3
    assert min(run_of(config).curve("memory/peak_bytes")) > 2**30, "of the largest process"


def test_becoming_slow_and_recovering() -> None:
    stragglers = Stragglers(2.0, ["a", "a", "b"])
    lines = [stragglers.note([1.0, 1.1, slow])[1] for slow in [1.0] * READINGS + [10.0] * 3 + [1.0] * READINGS]
    assert {number: said for number, said in enumerate(lines) if said} == {
        READINGS + 1: ["process 2 on b is slow: data and forward pass take it 3.250 s, the others 1.100 s"],
        2 * READINGS + 1: ["process 2 on b is slow no longer"],
    }
