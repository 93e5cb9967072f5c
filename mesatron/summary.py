"""What a run came to, read back from its folder. Free of torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mesatron.checkpoint.verify import list_checkpoints
from mesatron.config import load_config
from mesatron.errors import ConfigError


@dataclass(frozen=True)
class Summary:
    """Figures of a run; perplexities are None before the first validation."""

    step: int
    steps: int
    tokens_seen: int
    first_perplexity: float | None
    last_perplexity: float | None
    tokens_per_second: float
    checkpoint: Path | None
    tensorboard: Path


def summarize(run_folder: Path) -> Summary:
    """The summary of a run folder. Raises ConfigError when it is none."""
    if not (run_folder / "config.yaml").exists():
        raise ConfigError(f"{run_folder} is no run folder: it has no config.yaml; check the path.")
    if (run_folder / "manifest.json").exists():
        raise ConfigError(f"{run_folder} is a checkpoint; give the run folder that it lies in.")
    config = load_config(run_folder / "config.yaml")
    path = run_folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    # A last line without its end was torn by a kill or is being written.
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
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
    )
