"""A profiled step leaves a trace of every process, and the share of it that was communication."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from mesatron.train.profile import STEP, shares


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


@pytest.mark.parametrize("on_gpu", [True, False])
def test_shares_count_no_moment_twice(on_gpu: bool) -> None:
    """Seconds 0-4 and 3-5 of work, 4-8 of communication; not counted: annotations, a GPU's host, what was before."""
    kernel = DeviceType.CUDA if on_gpu else DeviceType.CPU
    names = ("gemm", "ncclDevKernel_AllReduce") if on_gpu else ("aten::mm", "gloo:all_reduce")

    def event(name: str, begin: float, end: float, device: DeviceType = kernel, note: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=begin * 1e6, end=end * 1e6)
        return SimpleNamespace(name=name, device_type=device, is_user_annotation=note, time_range=span)

    events = [event(names[0], 0, 4), event(names[0], 3, 5), event(names[1], 4, 8)]
    events += [event(STEP, 0, 10, DeviceType.CPU), event(names[1], -3, -1), event("gloo:barrier", -2, 0)]
    if on_gpu:
        events += [event(STEP, 0, 10, note=True), event("nccl:all_reduce", 0, 10, note=True)]
        events.append(event("aten::mm", 0, 10, DeviceType.CPU))
    assert shares(events, on_gpu) == {
        "profile/seconds": 10.0,
        "profile/computing": 0.5,
        "profile/communicating": 0.4,
        "profile/only_communicating": pytest.approx(0.3),
    }
