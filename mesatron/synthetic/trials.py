"""Which trainings a call asks for, each of them with its result in a file of its own, and the scores of them all."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from pydantic import ValidationError

from mesatron.config import ModelConfig
from mesatron.config.checks import pattern_problem
from mesatron.config.schema import TrainConfig
from mesatron.errors import ConfigError, MemoryExhaustedError
from mesatron.files import replace_file
from mesatron.parallel.distributed import World
from mesatron.synthetic.model import build
from mesatron.synthetic.paper import (
    ACCURACIES,
    BATCH_SIZE,
    FINAL_LR,
    LEARNING_RATES,
    MODEL,
    START_LR,
    WARMUP_STEPS,
    WEIGHT_DECAYS,
    Sweep,
    average,
)
from mesatron.synthetic.tasks import TASKS, Task
from mesatron.synthetic.training import accuracy, fit, likeliest
from mesatron.terminal import markdown_table
from mesatron.train.environment import describe_environment

NO_MIXER = "none"


@dataclass(frozen=True)
class Trial:
    """One training: a task in a setting, a mixer or a pattern such as `mesa+swa-64`, and how it is optimized."""

    task: Task
    mixer: str
    epochs: int
    peak_lr: float
    weight_decay: float
    seed: int
    test_examples: int

    def settings(self) -> dict[str, Any]:
        """All that the result depends on besides task and mixer."""
        own = {name: getattr(self, name) for name in ("epochs", "peak_lr", "weight_decay", "seed", "test_examples")}
        return self.task.settings() | own

    def file(self, folder: Path) -> Path:
        """Where the result lies in the folder of all."""
        name = "_".join(f"{key}-{value}" for key, value in self.settings().items())
        return folder / self.mixer / self.task.name / f"{name}.json"

    def model(self) -> ModelConfig:
        """The config of its model (paper table 9). Raises ConfigError for a mixer that there is not, or too many."""
        names = self.mixer.split("+")
        chosen = {} if self.mixer == NO_MIXER else {"mixer": names if len(names) > 1 else self.mixer}
        try:
            model = ModelConfig.model_validate(MODEL | {"vocabulary_size": self.task.vocabulary_size} | chosen)
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"]
            raise ConfigError(
                f"--mixers has {self.mixer!r}: {message[0].lower()}{message[1:]} ({NO_MIXER} stands for no mixer)."
            ) from None
        if problem := pattern_problem(model):
            raise ConfigError(f"--mixers has {self.mixer!r}, but {problem}; name fewer.")
        return model

    def train(self) -> TrainConfig:
        """Its optimization (paper table 9); warm-up takes at most half of all steps."""
        steps = self.epochs * -(-self.task.examples // BATCH_SIZE)
        return TrainConfig(
            steps=steps, global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE, precision="fp32",
            peak_lr=self.peak_lr, start_lr=START_LR, final_lr_fraction=FINAL_LR / self.peak_lr,
            warmup_steps=min(WARMUP_STEPS, steps // 2), weight_decay=self.weight_decay, seed=self.seed,
        )  # fmt: skip


def plan(
    tasks: Iterable[Task], mixers: Iterable[str], sweep: Sweep, epochs: int | None, test_examples: int | None,
    peak_lr: float, weight_decay: float, seed: int,
) -> list[Trial]:  # fmt: skip
    """All trainings that these ask for; epochs and test examples are the task's own where None.

    Raises ConfigError for a mixer that there is not, for more of them than blocks, and for a setting that a task's
    sweep cannot have.
    """
    optimizers = [(peak_lr, weight_decay)]
    if sweep != "none":
        optimizers = [(rate, decay) for rate in LEARNING_RATES for decay in WEIGHT_DECAYS]
    trials = [
        Trial(setting, mixer, epochs or task.epochs, *optimizer, seed, test_examples or task.test_examples)
        for task in tasks
        for mixer in mixers
        for setting in (task.swept() if sweep == "paper" else [task])
        for optimizer in optimizers
    ]
    for trial in trials:
        trial.model()
    return trials


def results(
    trials: Iterable[Trial], folder: Path, overwrite: bool, report: Callable[[str], None]
) -> Iterator[tuple[Trial, dict[str, Any]]]:
    """Each trial with its result: read where it is there, else made and written. `report` gets lines about the making.

    Raises ConfigError for a file in its place that is no result, MemoryExhaustedError.
    """
    for trial in trials:
        file = trial.file(folder)
        if file.exists() and not overwrite:
            yield trial, _read(trial, file)
            continue
        result = run(trial, report)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, [json.dumps(result, indent=1).encode() + b"\n"])
        yield trial, result


def _read(trial: Trial, file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text())
        if result["settings"] == trial.settings() and all(
            isinstance(result[key], float) for key in ("accuracy", "seconds")
        ):
            return result
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError(f"{file} is no result of its training; remove it, or pass --overwrite to replace it.")


def run(trial: Trial, report: Callable[[str], None]) -> dict[str, Any]:
    """Train and test one model, on the GPU if there is one. `report` gets a line for every tenth of the steps."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task, train, seed = trial.task, trial.train(), trial.seed
    model = build(task, trial.model(), trial.mixer != NO_MIXER, seed).to(device)
    begin = time.monotonic()
    curve: list[tuple[int, float]] = []

    def epoch(step: int, loss: float) -> None:
        last = curve[-1][0] if curve else 0
        curve.append((step, loss))
        if 10 * step // train.steps > 10 * last // train.steps:
            report(f"{task.name} {trial.mixer}: step {step:,} of {train.steps:,}, loss {loss:.4f}")

    try:
        steps = fit(model, task.generate(task.examples, seed, "train"), train, device, epoch)
        test = task.generate(trial.test_examples, seed, "test")
        score = accuracy(likeliest(model, device), test, BATCH_SIZE)
    except (torch.OutOfMemoryError, MemoryError):
        raise MemoryExhaustedError(
            f"{task.examples:,} examples of {task.name}, {BATCH_SIZE} of {task.length} tokens at a time, do not fit "
            f"into the memory of {device} with mixer {trial.mixer}; lower --examples or --length."
        ) from None
    if steps < train.steps:
        report(f"{task.name} {trial.mixer}: a gradient was not finite at step {steps + 1:,}, which ended the training.")
    return {
        "task": task.name, "mixer": trial.mixer, "settings": trial.settings(), "accuracy": score,
        "steps": steps, "steps_planned": train.steps, "losses": curve,
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": round(time.monotonic() - begin, 1),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": describe_environment(World(0, 1, device)),
    }  # fmt: skip


def scores(outcomes: Iterable[tuple[Trial, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Percent by mixer and task: the mean over a task's settings, by the learning rate and decay that are best for it.

    The best is chosen by the test, as in MAD and the paper.
    """
    found: dict[tuple[str, str], dict[tuple[float, float], list[float]]] = {}
    for trial, result in outcomes:
        by_optimizer = found.setdefault((trial.mixer, trial.task.name), {})
        by_optimizer.setdefault((trial.peak_lr, trial.weight_decay), []).append(100 * result["accuracy"])
    best: dict[str, dict[str, float]] = {}
    for (mixer, task), by_optimizer in found.items():
        best.setdefault(mixer, {})[task] = max(mean(values) for values in by_optimizer.values())
    return best


def comparison(percent: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    """Rows of a table in percent, headings first: each mixer of `scores`, and the paper's figures under it if any."""
    tasks = [name for name in TASKS if any(name in row for row in percent.values())]
    rows = [("mixer", *tasks, "MAD average")]
    for mixer, figures in percent.items():
        for name, row in ((mixer, figures), (f"{mixer}, paper", ACCURACIES.get(mixer, {}))):
            if row.keys() & set(tasks):
                cells = [*(row.get(task) for task in tasks), average(row)]
                rows.append((name, *("" if cell is None else f"{cell:.1f}" for cell in cells)))
    return rows


def footnote(trials: Iterable[Trial], sweep: Sweep) -> str:
    """What the figures of a table are of, which need not be what the paper's are of."""
    seen = {(t.task.name, t.task.length, t.task.vocabulary_size, t.task.examples, t.epochs) for t in trials}
    if sweep == "paper":
        return "Both: mean over all settings of a task, by the best learning rate and decay of the paper's sweep."
    ours = "; ".join(
        f"{name} {length} tokens of {vocabulary}, {examples:,} examples, {epochs} epochs"
        for name, length, vocabulary, examples, epochs in sorted(seen)
    )
    return f"The paper's: mean over all settings of a task, by the best of its sweep. Ours: {ours}; sweep {sweep}."


def markdown(rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown, whose first row is its heading."""
    return "\n".join(markdown_table(rows)) + "\n"
