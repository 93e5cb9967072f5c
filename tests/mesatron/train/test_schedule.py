"""Learning rates against the paper's schedule (arXiv 2506.05233, section G.3) written with other arithmetic, at its
corners and for any lengths."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesatron.config import load_config
from mesatron.config.schema import TrainConfig
from mesatron.train.schedule import learning_rate

PAPER = Path(__file__).parents[3] / "configs/paper/mesanet-140m-15b.yaml"
RECIPE = load_config(PAPER).train


def schedule(**settings: Any) -> list[float]:
    """Learning rates of all steps; index 0 is step 1."""
    train = RECIPE.model_copy(update={"peak_lr": 1.0, "start_lr": 0.01, "final_lr_fraction": 0.1} | settings)
    return [learning_rate(train, step) for step in range(1, train.steps + 1)]


def test_the_paper_s_schedule() -> None:
    rates = np.array([learning_rate(RECIPE, step) for step in range(1, RECIPE.steps + 1)])
    assert rates[0] == 1e-6
    assert rates.argmax() == 2000
    assert rates[2000] == 3e-3
    assert rates[-1] == pytest.approx(3e-4)
    np.testing.assert_allclose(rates[:2001], np.linspace(1e-6, 3e-3, 2001), rtol=1e-12)
    angles = np.linspace(0, math.pi, RECIPE.steps - 2000)
    np.testing.assert_allclose(rates[2000:], 3e-3 * (0.55 + 0.45 * np.cos(angles)), rtol=1e-9)


def test_warmup_stable_decay() -> None:
    rates = schedule(schedule="wsd", steps=50, warmup_steps=10, decay_fraction=0.2)
    np.testing.assert_allclose(rates[:11], np.linspace(0.01, 1, 11))
    assert rates[10:40] == [1.0] * 30
    np.testing.assert_allclose(rates[39:], np.linspace(1, 0.1, 11))


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_short_and_edge_cases(kind: str) -> None:
    assert schedule(schedule=kind, steps=1, warmup_steps=0) == [1.0 if kind == "cosine" else 0.1]
    assert schedule(schedule=kind, steps=7, warmup_steps=0, final_lr_fraction=1.0) == [1.0] * 7
    assert schedule(schedule=kind, steps=2, warmup_steps=1)[0] == 0.01
    assert schedule(schedule=kind, steps=40, warmup_steps=3, final_lr_fraction=0.0)[-1] == pytest.approx(0, abs=1e-15)


@st.composite
def trains(draw: st.DrawFn) -> TrainConfig:
    steps = draw(st.integers(2, 300))
    warmup, peak = draw(st.integers(0, steps - 1)), draw(st.floats(1e-5, 1))
    return RECIPE.model_copy(
        update={
            "steps": steps, "warmup_steps": warmup, "peak_lr": peak, "start_lr": draw(st.floats(0, peak)),
            "final_lr_fraction": draw(st.floats(0, 1)), "schedule": draw(st.sampled_from(["cosine", "wsd"])),
            "decay_fraction": draw(st.floats(1e-3, max(1e-3, (steps - warmup - 1) / steps))),
        }
    )  # fmt: skip


def fits(train: TrainConfig) -> bool:
    return train.schedule == "cosine" or train.warmup_steps + train.decay_steps < train.steps


@given(trains().filter(fits))
def test_rises_to_the_peak_then_never_rises_and_ends_at_its_fraction(train: TrainConfig) -> None:
    rates = np.array([learning_rate(train, step) for step in range(1, train.steps + 1)])
    rounding = 1e-12 * train.peak_lr
    assert rates[0] == (train.start_lr if train.warmup_steps else rates.max())
    assert (np.diff(rates[: train.warmup_steps + 1]) >= -rounding).all()
    assert (np.diff(rates[train.warmup_steps :]) <= rounding).all()
    assert rates.max() <= train.peak_lr + rounding
    if train.warmup_steps < train.steps - 1:
        assert rates[-1] == pytest.approx(train.peak_lr * train.final_lr_fraction, abs=rounding)
