"""`mesatron bench layouts`: real trainings in layouts, what they leave as figures, and layouts that cannot train."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import yaml

from mesatron.config import load_config
from mesatron.errors import ConfigError
from mesatron.prove.layouts import Case
from mesatron.prove.speed import layouts, measure

VALUES = {
    "model": {"vocabulary_size": 300, "width": 24, "layers": 2, "heads": 4, "head_dim": 6},
    "tokenizer": {"path": "none"},
    "data": {"input_folder": "none", "folder": "shards", "context_length": 64, "weights": {"c": 1}},
    "train": {"global_batch_size": 8, "micro_batch_size": 2, "warmup_steps": 2, "peak_lr": 1e-3},
    "checkpoint": {"every_steps": 1, "keep_every_steps": 1, "local_folder": "/nowhere", "local_every_steps": 1},
}


def test_layouts_are_measured_or_say_why_not(tmp_path: Path, fork_server: ForkServerContext) -> None:
    file, folder = tmp_path / "config.yaml", tmp_path / "a #1: {ü}, 'new'"
    file.write_text(yaml.safe_dump(VALUES))
    cases = [Case(tensor=2, sequence_parallel=True), Case(pipeline=2)]
    replaced = ["train.micro_batch_size=3", "parallel.tensor_size=3"]  # neither fits, and neither is used
    rows = list(measure(fork_server, folder, file, ["train.seed=7", *replaced], cases, [2, 3], steps=2, seconds=120))
    assert [(row.layout, row.micro_batch) for row in rows] == [(case.name, size) for case in cases for size in (2, 3)]
    for row in rows[::2]:
        assert row.failure is None
        assert row.tokens_per_second is not None
        assert row.tokens_per_second > 100
        assert row.peak_bytes is not None
        assert row.peak_bytes > 2**26
        assert row.device_bytes is None
        assert row.profiled_seconds is not None
        assert 0 < row.profiled_seconds < 60
        assert row.computing is not None
        assert 0 < row.computing < 1
        assert row.communicating is not None
        assert 0 < row.communicating < 1
    for row in rows[1::2]:
        assert row.failure is not None
        assert "8 = 2 x 3 + 2" in row.failure
        assert row.tokens_per_second is None
    assert not list(folder.glob("*/speed/checkpoints/step-*"))


def test_a_layout_that_fails_gives_its_reason(tmp_path: Path, fork_server: ForkServerContext) -> None:
    """What the trainings wrote may be gone when the message is read. fla-core has no kernel of GLA in fp32."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(VALUES))
    settings = ["model.mixer=gla", "model.gla.implementation=fla", "train.precision=fp32"]
    (row,) = measure(fork_server, tmp_path / "new", file, settings, [Case(data=2)], [2], steps=2, seconds=120)
    assert row.failure is not None
    assert "model.gla.implementation is fla, which cannot be used" in row.failure
    assert str(tmp_path) not in row.failure
    assert len(row.logs) == 2
    assert any("model.gla.implementation is fla" in line for lines in row.logs for line in lines)


@pytest.mark.parametrize("sizes", [[], [2]])
def test_a_config_that_no_layout_mends_is_refused(
    sizes: list[int], tmp_path: Path, fork_server: ForkServerContext
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(VALUES))
    wrong = "model.heads=5" if sizes else "train.micro_batch_size=3"
    with pytest.raises(ConfigError, match="must"):
        next(measure(fork_server, tmp_path / "new", file, [wrong], [Case(data=2)], sizes, steps=2, seconds=120))
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_what_is_measured_is_kept_at_once(tmp_path: Path) -> None:
    """Ctrl-C after the first of two rows."""
    file, figures = tmp_path / "config.yaml", tmp_path / "figures.json"
    file.write_text(yaml.safe_dump(VALUES))
    options = ["--processes=1", "--micro-batch=2", "--micro-batch=4", "--steps=2", f"--json={figures}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mesatron", "bench", "layouts", str(file), *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    begin = "one process, ZeRO-1, micro-batch 2: "
    line = next(line for line in process.stderr if line.startswith(begin))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    (row,) = json.loads(figures.read_text())["rows"]
    assert line == f"{begin}{row['tokens_per_second']:,.0f} tokens/s\n"


@pytest.mark.parametrize("processes", [1, 2, 4, 6, 8])
def test_listed_layouts_take_all_processes_and_differ(processes: int, tmp_path: Path) -> None:
    cases = layouts(processes)
    assert {case.processes for case in cases} == {processes}
    assert len({case.name for case in cases}) == len(cases)
    file = tmp_path / "config.yaml"
    model = {"heads": 120, "layers": 8, "head_dim": 2, "width": 240}
    values = VALUES | {"model": VALUES["model"] | model, "name": "a", "checkpoint": {"every_steps": 3}}
    values |= {"data": VALUES["data"] | {"context_length": 480}, "train": VALUES["train"] | {"steps": 9}}
    file.write_text(yaml.safe_dump(values))
    for case in cases:
        load_config(file, case.parallel)
