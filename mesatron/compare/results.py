"""What the finished variants of a comparison came to, read back from their run folders. Free of torch."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

from mesatron.compare.runs import PERPLEXITY, is_measured
from mesatron.compare.variants import Comparison
from mesatron.config import Config
from mesatron.evaluate.paper import paper_perplexity
from mesatron.monitor.metrics import read_metrics

Curve = list[tuple[int, float]]
"""Steps and values."""


@dataclass(frozen=True)
class Result:
    """Figures of one variant.

    loss, perplexity, and losses and tokens by source and position: on the whole validation split, as
    mesatron.evaluate.perplexity defines them. tokens_per_second: median over the later half of training.
    peak_bytes: of the largest process, on its GPU if it has one. paper_perplexity: of a run like this, if there is one.
    """

    name: str
    mixer: str
    parameters: int
    tokens_trained: int
    loss: float
    perplexity: float
    paper_perplexity: float | None
    loss_by_source: dict[str, float]
    loss_by_position: list[float | None]
    tokens_by_position: list[int]
    tokens_per_second: float
    peak_bytes: float
    environment: dict[str, Any]
    train_loss: Curve
    validation_loss: Curve

    def difference(self, reference: Result) -> list[float | None]:
        """Loss at every position less that of `reference`, in nats; negative is better."""
        pairs = zip(self.loss_by_position, reference.loss_by_position, strict=True)
        return [None if own is None or other is None else own - other for own, other in pairs]

    def mean_difference(self, reference: Result, begin: int, end: int) -> float | None:
        """The difference over the tokens at positions `begin` to `end` - 1; None if none of them is scored."""
        differences = zip(self.difference(reference)[begin:end], self.tokens_by_position[begin:end], strict=True)
        weighted = [(value * tokens, tokens) for value, tokens in differences if value is not None]
        return sum(value for value, _ in weighted) / sum(tokens for _, tokens in weighted) if weighted else None


def read_results(comparison: Comparison) -> list[Result]:
    """The results of the variants that are measured, in the file's order."""
    return [_read(variant.name, variant.config) for variant in comparison.variants if is_measured(variant)]


def _read(name: str, config: Config) -> Result:
    folder = config.run_folder
    measured = json.loads((folder / PERPLEXITY).read_text())
    lines = read_metrics(folder / "metrics.jsonl")
    training = [line for line in lines if "train/loss" in line]
    warm = training[len(training) // 2 :]
    mixer = config.model.mixer
    return Result(
        name=name,
        mixer=mixer if isinstance(mixer, str) else " ".join(mixer),
        parameters=config.model.parameter_count(),
        tokens_trained=config.train.steps * config.tokens_per_step,
        loss=measured["loss"],
        perplexity=measured["perplexity"],
        paper_perplexity=paper_perplexity(config),
        loss_by_source=measured["loss_by_source"],
        loss_by_position=measured["loss_by_position"],
        tokens_by_position=measured["tokens_by_position"],
        tokens_per_second=statistics.median(float(line["train/tokens_per_second"]) for line in warm),
        peak_bytes=max(float(line["memory/peak_bytes"]) for line in training),
        environment=json.loads((folder / "environment.json").read_text()),
        train_loss=[(line["step"], float(line["train/loss"])) for line in training],
        validation_loss=[(line["step"], float(line["validation/loss"])) for line in lines if "validation/loss" in line],
    )
