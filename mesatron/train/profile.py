"""The trace of a training step, and which part of it is communication."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mesatron.errors import DiskFullError
from mesatron.files import replace_file

COMMUNICATION = ("nccl", "gloo:")
"""What the names of collectives and point-to-point calls begin with, as kernels of a GPU and on a CPU."""
STEP = "mesatron step"
"""The name that the trace gives to all that was run."""

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that are a GPU's work."""

Interval = tuple[float, float]


@contextmanager
def profiled(
    file: Path, device: torch.device, meet: Callable[[], None], alive: Callable[[], None]
) -> Iterator[dict[str, float]]:
    """Trace what runs inside into `file` (.json.gz, for chrome://tracing or Perfetto).

    The scalars of `shares` stand in the dict when the context has ended. `meet` waits for all processes: a profiler's
    first start takes seconds, not the same everywhere, and the wait for the last one is no part of the step.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    figures: dict[str, float] = {}
    with profile(activities=activities) as trace:
        if on_gpu:
            torch.cuda.synchronize()
        meet()
        with record_function(STEP):
            yield figures
            if on_gpu:
                torch.cuda.synchronize()
    alive()
    events = _save(trace, file)
    alive()
    figures |= shares(events, on_gpu)


def _save(trace: profile, file: Path) -> list[dict[str, Any]]:
    """Write a trace to `file` and return its events.

    They are read back, since torch's own lists of them take ten times as long to make, and so does its compression.
    """
    with tempfile.TemporaryDirectory() as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        plain = Path(f"/proc/self/fd/{descriptor}/trace.json")  # in a trace its path stands as it is, with any quotes
        trace.export_chrome_trace(str(plain))
        try:
            text = plain.read_bytes()
            events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
        except (FileNotFoundError, ValueError):  # what writes it does not say why it could not
            raise DiskFullError(f"No space left for a trace in {folder}: free some, or set TMPDIR.") from None
        finally:
            os.close(descriptor)
    file.parent.mkdir(exist_ok=True)
    replace_file(file, [gzip.compress(text, compresslevel=1)])
    return events


def shares(events: Iterable[Mapping[str, Any]], on_gpu: bool) -> dict[str, float]:
    """Of the STEP among a trace's `events`: its seconds, and the shares of it in which it

    computes (kernels of the GPU, operators on a CPU), communicates, and communicates while it computes nothing. To wait
    for other processes inside a collective is to communicate.
    """
    spans = [event for event in events if "dur" in event]  # microseconds, as "ts" is, when it began
    step = next(event for event in spans if (event["name"], event["cat"]) == (STEP, "user_annotation"))
    work: list[Interval] = []
    sent: list[Interval] = []
    for event in spans:
        if event["ts"] < step["ts"]:
            continue
        interval = event["ts"], event["ts"] + event["dur"]
        is_gpu_work = event["cat"] in ON_GPU
        if event["name"].startswith(COMMUNICATION) and (is_gpu_work or not on_gpu):
            sent.append(interval)
        elif is_gpu_work or (not on_gpu and event["name"].startswith("aten::")):
            work.append(interval)
    busy, computing, communicating = _covered(work + sent), _covered(work), _covered(sent)
    return {
        "profile/seconds": step["dur"] / 1e6,
        "profile/computing": computing / step["dur"],
        "profile/communicating": communicating / step["dur"],
        "profile/only_communicating": (busy - computing) / step["dur"],
    }


def describe(figures: dict[str, float]) -> str:
    """One line for the log."""
    return (
        f"{figures['profile/seconds']:.3f} s under the profiler: {figures['profile/computing']:.1%} computing, "
        f"{figures['profile/communicating']:.1%} communicating or waiting for others, of it "
        f"{figures['profile/only_communicating']:.1%} of the step with no computing beside it"
    )


def _covered(intervals: list[Interval]) -> float:
    """Length of the union."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
