"""What a run came to, read back from its folder. Free of torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesatron.checkpoint.format import STATE
from mesatron.checkpoint.verify import list_checkpoints
from mesatron.config import load_stored_config
from mesatron.errors import ENDED_AFTER_SAVING, ConfigError
from mesatron.monitor.attempts import read_attempts
from mesatron.monitor.goodput import Goodput, account
from mesatron.monitor.metrics import read_metrics


@dataclass(frozen=True)
class Summary:
    """Figures of a run; perplexities are None before the first validation, goodput before the first attempt."""

    step: int
    steps: int
    tokens_seen: int
    first_perplexity: float | None
    last_perplexity: float | None
    tokens_per_second: float
    checkpoint: Path | None
    tensorboard: Path
    goodput: Goodput | None


def summarize(run_folder: Path) -> Summary:
    """The summary of a run folder. Raises ConfigError when it is none."""
    if not (run_folder / "config.yaml").exists():
        raise ConfigError(f"{run_folder} is no run folder: it has no config.yaml; check the path.")
    if (run_folder / "manifest.json").exists():
        raise ConfigError(f"{run_folder} is a checkpoint; give the run folder that it lies in.")
    config = load_stored_config(run_folder / "config.yaml")
    lines = read_metrics(run_folder / "metrics.jsonl")
    training = [line for line in lines if "train/loss" in line]
    perplexities = [float(line["validation/perplexity"]) for line in lines if "validation/perplexity" in line]
    speeds = sorted(line["train/tokens_per_second"] for line in training)
    complete = [info for info in list_checkpoints(run_folder / "checkpoints") if info.status == "complete"]
    return Summary(
        step=complete[-1].step if complete else 0,
        steps=config.train.steps,
        tokens_seen=int(training[-1]["train/tokens"]) if training else 0,
        first_perplexity=perplexities[0] if perplexities else None,
        last_perplexity=perplexities[-1] if perplexities else None,
        tokens_per_second=speeds[len(speeds) // 2] if speeds else 0.0,
        checkpoint=complete[-1].path if complete else None,
        tensorboard=run_folder / "tensorboard",
        goodput=_goodput(run_folder, complete[-1].path if complete else None, lines),
    )


def _goodput(run_folder: Path, checkpoint: Path | None, metrics: list[dict[str, Any]]) -> Goodput | None:
    records = read_attempts(run_folder / "attempts.jsonl")
    if not records:
        return None
    kept = json.loads((checkpoint / STATE).read_text()).get("seconds", {}) if checkpoint else {}
    # Attempts that never came to a step have nothing to say.
    ends = [record for record in records if record["event"] == "ready" or record.get("seconds")]
    if ends and ends[-1].get("exit_code") in ENDED_AFTER_SAVING:
        kept = ends[-1]["seconds"]
    started = max(record["time"] for record in records if record["event"] == "start")
    return account(records, kept, max([started, *(line["time"] for line in metrics[-1:])]))
