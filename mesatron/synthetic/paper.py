"""The paper on MAD (arXiv 2506.05233, table 9): how it trains and what it finds."""

from typing import Literal

Sweep = Literal["none", "optimizer", "paper"]
"""One training of each task; one for each learning rate and decay of the paper's; those for every setting of a task."""

MODEL = {"width": 128, "layers": 2, "heads": 8, "head_dim": 16}
BATCH_SIZE = 32
START_LR, FINAL_LR, WARMUP_STEPS = 1e-7, 1e-5, 750
LEARNING_RATES = (3e-3, 1e-3, 5e-4, 1e-4)
WEIGHT_DECAYS = (0.01, 0.1)

_COLUMNS = ("fuzzy-recall", "memorisation", "selective-copying", "compression")
_ROWS = {
    "mamba2": (100.0, 51.2, 42.0, 95.4, 41.3),
    "gla": (100.0, 39.0, 82.5, 96.1, 42.3),
    "mlstm": (100.0, 47.6, 79.8, 95.4, 43.4),
    "deltanet": (100.0, 55.5, 40.8, 98.8, 43.3),
    "gated_deltanet": (100.0, 32.7, 81.7, 95.7, 45.0),
    "hawk": (93.0, 13.6, 91.3, 77.0, 47.7),
    "mesa": (100.0, 58.5, 77.2, 99.2, 45.4),
    "hawk_mesa": (100.0, 30.2, 85.6, 99.6, 52.3),
    "transformer": (100.0, 48.6, 84.7, 96.0, 49.5),
}
ACCURACIES = {
    mixer: {"in-context-recall": recall, "noisy-recall": recall} | dict(zip(_COLUMNS, others, strict=True))
    for mixer, (recall, *others) in _ROWS.items()
}
"""Percent by the names that mixers and tasks have here; the paper's one figure for both plain recalls is at both."""


def average(percent: dict[str, float]) -> float | None:
    """The average over MAD's tasks, in-context and noisy recall counted as one; None unless all six are there."""
    if not {"in-context-recall", "noisy-recall", *_COLUMNS} <= percent.keys():
        return None
    recall = (percent["in-context-recall"] + percent["noisy-recall"]) / 2
    return (recall + sum(percent[name] for name in _COLUMNS)) / (1 + len(_COLUMNS))
