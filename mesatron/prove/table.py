"""Every layout against one process: the real trainer, run in each, and its records and checkpoints compared."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import yaml
from mesatron_data.synthetic import write_shards
from safetensors.torch import load_file
from torch import Tensor

from mesatron.checkpoint.format import step_name
from mesatron.config.mixers import parse_mixer
from mesatron.monitor.metrics import read_metrics
from mesatron.prove.layouts import Case
from mesatron.prove.worlds import WorldFailed, run_world

LIMITS = {"fp32": 2e-5, "bf16": 1e-2}
"""Largest relative difference that is rounding: of all figures in fp32, of losses in bf16, where one process's own
gradients are several percent from exact ones."""


@dataclass(frozen=True)
class Trace:
    """What a run did: loss and gradient norm of every step, then losses in validation, first gradients and last weights
    by name."""

    checksums: list[float]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """Relative differences of a layout from one process: the largest over steps, and over tensors with its name.

    They are infinite where either has a number that is not finite.
    """

    case: Case
    precision: str
    loss: float
    norm: float
    gradient: tuple[float, str]
    weight: tuple[float, str]

    @property
    def holds(self) -> bool:
        """Whether all that counts is rounding."""
        others = [] if self.precision == "bf16" else [self.norm, self.gradient[0], self.weight[0]]
        return all(figure <= LIMITS[self.precision] for figure in (self.loss, *others))


class Prover:
    """Runs a tiny model in `folder` in one layout after the other, in `precision`: fp32 or bf16; `mixer` is the pattern
    of its layers. A layout may take so many `seconds`.

    Sizes divide as little as they may: vocabulary_size, 3 blocks or more, sequences of 96 tokens that documents cross.
    The solver's tolerance is 1e-7, since context parallelism regroups chunks and so agrees to the tolerance only.
    Adam's epsilon is 1e-6, since it makes an update of full size from a gradient that is all rounding, and the norms'
    1e-2, since they divide a head's output by its size; they are 1e-4 and 1e-1 where there are mixers other than Mesa,
    whose gates' gradients and heads come nearer to 0.
    """

    def __init__(
        self,
        context: ForkServerContext,
        folder: Path,
        steps: int,
        precision: str = "fp32",
        vocabulary_size: int = 50257,
        mixer: Sequence[str] = ("mesa",),
        seconds: float = 300.0,
    ) -> None:
        self.context, self.folder, self.steps, self.precision = context, folder, steps, precision
        self.seconds = seconds
        self.traces: dict[Case, Trace] = {}
        layers = max(3, sum(len(parse_mixer(name)) for name in mixer))
        norm_epsilon, epsilon = (1e-2, 1e-6) if set(mixer) == {"mesa"} else (1e-1, 1e-4)
        values = {
            "name": "proof", "runs_folder": str(folder / "runs"),
            "model": {
                "vocabulary_size": vocabulary_size, "width": 24, "layers": layers, "heads": 4,
                "head_dim": 6, "mlp_ratio": 1.5, "norm_epsilon": norm_epsilon, "mixer": list(mixer),
                "mesa": {"chunk_size": 16, "solver_tolerance": 1e-7},
                "mesa_rls": {"chunk_size": 16, "solver_tolerance": 1e-7},
            },
            "tokenizer": {"path": str(folder / "no-tokenizer")},
            "data": {"input_folder": str(folder / "no-text"), "folder": str(folder / "shards"), "context_length": 96},
            "train": {
                "steps": steps, "global_batch_size": 12, "micro_batch_size": 1, "precision": precision, "peak_lr": 1e-3,
                "start_lr": 1e-3, "warmup_steps": 0, "epsilon": epsilon,
            },
            "checkpoint": {"every_steps": 1, "keep_last": steps},
            "evaluate": {"every_steps": steps, "max_sequences": 8, "micro_batch_size": 2},
        }  # fmt: skip
        write_shards(folder / "shards", vocabulary_size, 96, {"train": 12 * steps, "validation": 9}, seed=3)
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(values, sort_keys=False))

    def prove(self, case: Case) -> Verdict:
        """`case` against one process, which is run once. Raises WorldFailed."""
        if case.reference not in self.traces:
            self.traces[case.reference] = self.trace(case.reference)
        return compare(case, self.trace(case), self.traces[case.reference], self.precision)

    def trace(self, case: Case) -> Trace:
        """Train in `case` and read what it left."""
        run = self.folder / "runs/proof"
        shutil.rmtree(run, ignore_errors=True)
        arguments = ["train", str(self.config), *case.overrides]
        run_world(self.context, case.processes, arguments, self.folder, self.seconds)
        lines = read_metrics(run / "metrics.jsonl")
        checksums, losses, norms, validation = (
            [float(line[tag]) for line in lines if tag in line]
            for tag in ("data/samples_checksum", "train/loss", "train/grad_norm", "validation/loss")
        )
        # After one step Adam's first moment is the gradient, clipped and times 1 - beta1.
        moments = _tensors(run / "checkpoints" / step_name(1), "optimizer")
        gradients = {name: tensor for name, tensor in moments.items() if name.startswith("exp_avg/")}
        weights = _tensors(run / "checkpoints" / step_name(self.steps), "weights")
        return Trace(checksums, losses + validation, norms, gradients, weights)


def compare(case: Case, found: Trace, expected: Trace, precision: str = "fp32") -> Verdict:
    """Raises WorldFailed when the two did not even read the same sequences, or hold different tensors."""
    if found.checksums != expected.checksums or found.weights.keys() != expected.weights.keys():
        raise WorldFailed(f"{case.name} trains on other sequences, or other tensors, than one process does.")
    return Verdict(
        case,
        precision,
        _largest(found.losses, expected.losses),
        _largest(found.norms, expected.norms),
        _farthest(found.gradients, expected.gradients),
        _farthest(found.weights, expected.weights),
    )


def table(
    prover: Prover, cases: Iterable[Case], show: Callable[[str], None], explain: Callable[[str], None],
    begin: Callable[[int, str], None] = lambda done, name: None,
) -> bool:  # fmt: skip
    """Prove `cases` and show a line of each; returns whether all hold. `explain` gets the logs of those that failed.

    `begin` gets the number of cases done and the name of the next before each.
    """
    show(f"{'layout':48} {'loss':>8} {'norm':>8} {'gradient':>8} {'weights':>8}  verdict")
    hold = True
    for done, case in enumerate(cases):
        begin(done, case.name)
        try:
            verdict = prover.prove(case)
        except WorldFailed as error:
            hold = False
            show(f"{case.name:48} FAILED: {error}")
            for rank, lines in enumerate(error.logs):
                explain("\n".join([f"the last lines of process {rank} in {case.name}:", *lines]))
            continue
        hold &= verdict.holds
        figures = (verdict.loss, verdict.norm, verdict.gradient[0], verdict.weight[0])
        worst = "" if verdict.holds else f" (gradient of {verdict.gradient[1]}, weight {verdict.weight[1]})"
        numbers = " ".join(f"{figure:8.1e}" for figure in figures)
        show(f"{case.name:48} {numbers}  {'equal' if verdict.holds else 'DIFFERENT'}{worst}")
    return hold


def _tensors(checkpoint: Path, kind: str) -> dict[str, Tensor]:
    return {
        name: tensor for file in checkpoint.glob(f"{kind}-*.safetensors") for name, tensor in load_file(file).items()
    }


def _largest(found: list[float], expected: list[float]) -> float:
    return max(_relative(abs(a - b), abs(b)) for a, b in zip(found, expected, strict=True))


def _farthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Norm of the difference over the norm of the tensor, where it is largest."""
    return max(
        (_relative(float((found[name] - tensor).norm()), float(tensor.norm())), name)
        for name, tensor in expected.items()
    )


def _relative(difference: float, size: float) -> float:
    """Infinite for what is not finite, which `max` and `<=` would pass over as NaN, and for any difference from 0."""
    if difference == 0.0:
        return 0.0
    relative = difference / size if size else math.inf
    return relative if math.isfinite(relative) else math.inf
