"""How fast a config trains in each layout of so many processes, and how much of a step is communication."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from mesatron_data.synthetic import write_shards

from mesatron.config import accumulation_steps, as_override, data_parallel_size, load_config
from mesatron.errors import ConfigError
from mesatron.monitor.metrics import read_metrics
from mesatron.prove.layouts import Case
from mesatron.prove.worlds import WorldFailed, run_world

WARM_UP_STEPS = 3
"""Steps that are not counted, in which kernels are compiled and memory is taken."""


@dataclass(frozen=True)
class Speed:
    """One layout with one micro-batch."""

    layout: str
    micro_batch: int
    tokens_per_second: float | None = None
    """Median over the steps after WARM_UP_STEPS, of all processes together; None if the layout did not train."""
    peak_bytes: float | None = None
    """Memory of the largest process; that of its tensors, on its GPU, where it has one."""
    device_bytes: float | None = None
    """Memory of the fullest GPU that all take, NCCL and CUDA too; None without GPUs."""
    profiled_seconds: float | None = None
    """Of one more step under the profiler, which the next three are shares of (mesatron.train.profile)."""
    computing: float | None = None
    communicating: float | None = None
    """Or waiting for other processes to."""
    only_communicating: float | None = None
    failure: str | None = None
    """Why there are no figures."""
    logs: Sequence[Sequence[str]] = ()
    """The last lines of every process of a layout that failed."""


def layouts(processes: int) -> list[Case]:
    """Layouts of exactly so many processes: one kind of parallelism alone, and pairs that are in use."""
    cases = [Case(data=processes, zero_stage=stage) for stage in ((1, 2, 3) if processes > 1 else (1,))]
    for size in range(2, processes + 1):
        if processes % size:
            continue
        rest = processes // size
        cases += [Case(tensor=size, data=rest), Case(tensor=size, data=rest, sequence_parallel=True)]
        cases += [Case(context=size, data=rest), Case(pipeline=size, data=rest)]
        if rest > 1:
            cases.append(Case(tensor=size, context=rest, sequence_parallel=True))
            cases.append(Case(tensor=size, pipeline=rest, sequence_parallel=True))
    return cases


def measure(
    context: ForkServerContext, folder: Path, file: Path, overrides: Sequence[str], cases: Sequence[Case],
    micro_batches: Sequence[int], steps: int, seconds: float,
) -> Iterator[Speed]:  # fmt: skip
    """Train the config `file` with `overrides` for `steps` steps and a profiled one in every case, on random documents.

    micro_batches: each is tried in each case; none stands for the config's own. seconds: what one may take. Everything
    is written to `folder`, which must not exist. Raises ConfigError when the config is wrong whatever the layout.
    """
    last = WARM_UP_STEPS + steps + 1
    never = 10**6 * last
    own = [
        "name=speed",
        as_override("runs_folder", f"{folder}/runs"),
        as_override("tokenizer.path", f"{folder}/none"),
        as_override("data.input_folder", f"{folder}/none"),
        as_override("data.folder", f"{folder}/shards"),
        "data.weights=null",
        "data.num_canonical_nodes=1",
        f"train.steps={never}",
        "checkpoint.local_folder=null",
        "checkpoint.local_every_steps=0",
        f"checkpoint.every_steps={never}",
        "checkpoint.keep_every_steps=0",
        "evaluate.max_sequences=1",
        "evaluate.micro_batch_size=1",
        f"evaluate.every_steps={never}",
        "monitor.log_every_steps=1",
        f"monitor.histogram_every_steps={never}",
        f"monitor.profile_step={last}",
    ]
    settings = [*overrides, *own]
    # The layout and the micro-batch of the file are not those that train; one sequence in one process always fits.
    config = load_config(file, [*settings, *Case().parallel, *(["train.micro_batch_size=1"] if micro_batches else [])])
    folder.mkdir(parents=True)
    counts = {"train": config.train.global_batch_size * last, "validation": 64}
    write_shards(folder / "shards", config.model.vocabulary_size, config.data.context_length, counts, seed=1)
    tried = micro_batches or [config.train.micro_batch_size]
    for case in cases:
        for micro_batch in tried:
            row = Speed(case.name, micro_batch)
            laid_out = [*settings, *case.parallel, f"train.micro_batch_size={micro_batch}"]
            try:
                fitted = load_config(file, laid_out)
                accumulation_steps(fitted, data_parallel_size(fitted, case.processes))
                yield replace(row, **_trained(context, folder, file, laid_out, case.processes, last, seconds))
            except ConfigError as error:
                yield replace(row, failure=str(error))
            except WorldFailed as error:
                yield replace(row, failure=str(error), logs=error.logs)


def _trained(
    context: ForkServerContext, folder: Path, file: Path, settings: list[str], processes: int, last: int,
    seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """Every figure of a Speed."""
    runs = Path(tempfile.mkdtemp(dir=folder))
    metrics = runs / "speed/metrics.jsonl"

    def enough() -> bool:
        return any(line["step"] == last and "train/loss" in line for line in read_metrics(metrics))

    arguments = ["train", str(file), *settings, as_override("runs_folder", str(runs))]
    run_world(context, processes, arguments, folder, seconds, enough)
    points: dict[str, list[float]] = {}
    for line in read_metrics(metrics):
        if WARM_UP_STEPS < line["step"] <= last:  # it may have gone on before it was killed
            for tag, value in line.items():
                points.setdefault(tag, []).append(value)
    return {
        "tokens_per_second": statistics.median(points["train/tokens_per_second"][:-1]),
        "peak_bytes": max(points["memory/peak_bytes"]),
        "device_bytes": max(points.get("memory/device_bytes", ()), default=None),
        "profiled_seconds": points["profile/seconds"][0],
        **{name: points[f"profile/{name}"][0] for name in ("computing", "communicating", "only_communicating")},
    }
