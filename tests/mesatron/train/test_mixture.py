"""What a run records of its sources: training loss by source against the losses of the step it belongs to, and the
mixture it had against the mixture asked for, in several layouts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mesatron_data.manifest import load_manifest
from mesatron_data.plan import Options
from mesatron_data.shards import prepare

TAGS = ("train/loss_by_source", "mixture/achieved", "mixture/asked")


@pytest.fixture(scope="module")
def by_source(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by-source") / "shards"
    prepare(str(tiny_data / "raw"), folder, tiny_data / "tokenizer", 64, options=Options(by_source=True))
    return folder


def test_sources_are_told_apart_in_every_layout(
    by_source: Path, tmp_path: Path, tiny_config: Callable, train: Callable, run_of: Callable
) -> None:
    manifest = load_manifest(str(by_source))
    counts = manifest.splits["train"].source_samples
    first, second = sorted(counts, key=lambda name: -counts[name])[:2]
    settings = {
        "data.folder": str(by_source), f"data.weights.{first}": 3.0, f"data.weights.{second}": 1.0,
        "evaluate.every_steps": 100, "train.steps": 3, "model.layers": 2,
    }  # fmt: skip
    layouts = {1: {}, 2: {"parallel.pipeline_size": 2}, 4: {"parallel.context_size": 2, "parallel.zero_stage": 2}}
    curves = []
    for size, layout in layouts.items():
        config = tiny_config(tmp_path / str(size), **settings, **layout)
        outcome = train(size, config)
        assert outcome.exit_code == 0, outcome.errors
        run = run_of(config)
        curves.append([run.curve(f"{tag}/{name}") for tag in TAGS for name in (first, second)])
        losses = [run.curve(f"train/loss_by_source/{name}") for name in (first, second)]
        achieved = [run.curve(f"mixture/achieved/{name}") for name in (first, second)]
        for step, loss in enumerate(run.curve("train/loss")):
            shares = [share[step] for share in achieved]
            assert sum(shares) == pytest.approx(1)
            assert shares[0] == pytest.approx(0.75, abs=0.03)
            assert sum(a * b[step] for a, b in zip(shares, losses, strict=True)) == pytest.approx(loss, rel=1e-6)
        assert run.curve(f"mixture/asked/{first}") == [0.75] * 3
        assert run.curve(f"mixture/asked/{second}") == [0.25] * 3
        others = [name for name in manifest.sources if name not in (first, second)]
        assert others
        assert all(run.curve(f"mixture/achieved/{name}") == [0.0] * 3 for name in others)
    for other in curves[1:]:
        for one, same in zip(curves[0], other, strict=True):
            assert one == pytest.approx(same, rel=1e-4)
    changed = train(1, tmp_path / "1/config.yaml", "train.steps=4", f"data.weights.{second}=2")
    assert changed.exit_code == 2
    assert "reads its data in an order that these settings would change" in changed.errors
