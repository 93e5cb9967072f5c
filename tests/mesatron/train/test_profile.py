"""A profiled step leaves a trace of every process, and the share of it that was communication."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mesatron.train.profile import STEP, profiled, shares


def test_a_step_is_traced_in_every_process(
    tmp_path: Path, odd_config: Callable, short_data: Path, train: Callable, run_of: Callable
) -> None:
    settings = {"parallel.tensor_size": 2, "model.width": 24, "model.heads": 4, "model.head_dim": 6}
    config = odd_config(tmp_path, short_data, **{"train.steps": 3, "monitor.profile_step": 2} | settings)
    outcome = train(2, config)
    assert outcome.exit_code == 0, outcome.errors
    run = run_of(config)
    traces = sorted((run.path / "profile").iterdir())
    assert [trace.name for trace in traces] == [f"step-00000002-attempt-0001-rank-{rank}.json.gz" for rank in (0, 1)]
    for trace in traces:
        names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
        assert {"aten::mm", "gloo:all_reduce"} <= names
    (line,) = [line for line in outcome.output.splitlines() if "under the profiler" in line]
    assert "step 2: " in line
    found = {tag: value for tag, step, value, *_ in run.events() if tag.startswith("profile/") and step == 2}
    assert 0 < found["profile/communicating"] < 1
    assert 0 < found["profile/computing"] <= 1
    assert 0 < found["profile/seconds"] < 60


def test_a_profiler_that_starts_late_is_no_communication(tmp_path: Path, world: Callable) -> None:
    """Its start takes the second process four seconds longer than the first, the step of both next to nothing."""
    outcome = world(2, Path(__file__).with_name("late_profiler.py"), tmp_path)
    assert outcome.exit_code == 0, outcome.errors
    figures = json.loads(outcome.output)
    assert figures["profile/seconds"] < 2


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from mesatron.errors import DiskFullError
from mesatron.train.profile import profiled
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    with profiled(Path(sys.argv[1]), torch.device("cpu"), lambda: None, lambda: None):
        [torch.ones(2) for _ in range(1000)]
except DiskFullError as error:
    print(error)
"""


def test_a_trace_that_finds_no_space_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "profile/trace.json.gz")], capture_output=True, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
    )  # fmt: skip
    assert done.stdout.startswith("No space left for a trace in "), done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_temporary_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, trace = tmp_path / 'a "b" \\ ü', tmp_path / "profile/trace.json.gz"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with profiled(trace, torch.device("cpu"), lambda: None, lambda: None):
        torch.ones(2)
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("on_gpu", [True, False])
def test_shares_count_no_moment_twice(on_gpu: bool) -> None:
    """Seconds 0-4 and 3-5 of work, 4-8 of communication; not counted: annotations, a GPU's host, what was before."""
    kernel = "kernel" if on_gpu else "cpu_op"
    names = ("gemm", "ncclDevKernel_AllReduce") if on_gpu else ("aten::mm", "gloo:all_reduce")

    def event(name: str, begin: float, end: float, category: str = kernel) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6}

    events = [event(names[0], 0, 4), event(names[0], 3, 5), event(names[1], 4, 8)]
    events += [event(STEP, 0, 10, "user_annotation"), event(names[1], -3, -1), event("gloo:barrier", -2, 0)]
    events.append({"ph": "M", "name": "process_name", "ts": 0, "args": {"name": "python"}})
    if on_gpu:
        events += [event(name, 0, 10, "gpu_user_annotation") for name in (STEP, "nccl:all_reduce")]
        events += [event("aten::mm", 0, 10, "cpu_op"), event("nccl:all_reduce", 0, 10, "user_annotation")]
    assert shares(events, on_gpu) == {
        "profile/seconds": 10.0,
        "profile/computing": 0.5,
        "profile/communicating": 0.4,
        "profile/only_communicating": pytest.approx(0.3),
    }
