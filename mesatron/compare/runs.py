"""Train and measure the variants of a comparison, each in processes of its own, going on where it was left."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mesatron_data.manifest import load_manifest

from mesatron.checkpoint.format import STATE
from mesatron.checkpoint.verify import list_checkpoints
from mesatron.cluster.job import LAUNCH_FOLDER
from mesatron.cluster.submission import Request, plan_array, refuse_active, submit
from mesatron.compare.variants import Comparison, Variant
from mesatron.config import changed_keys, load_config
from mesatron.errors import ConfigError, DataError, PreemptedError, StoppedEarly
from mesatron.processes import end_with_parent

PERPLEXITY = Path("eval/perplexity.json")
"""In a run folder: what `mesatron evaluate perplexity --json` wrote at its end."""
LOCK = ".lock"
"""In a comparison's folder, from its beginning on."""
INTERRUPTED = 130
INTERRUPT_SECONDS = 10
"""An interrupted verb may take so long to end before it is interrupted again."""


def last_checkpoint(variant: Variant) -> Path | None:
    """The folder of the last step's checkpoint; None before it is complete."""
    checkpoints = list_checkpoints(variant.config.run_folder / "checkpoints")
    complete = (info for info in checkpoints if info.status == "complete")
    return next((info.path for info in complete if info.step == variant.config.train.steps), None)


def is_trained(variant: Variant) -> bool:
    """Whether the checkpoint of the last step is there."""
    return last_checkpoint(variant) is not None


def is_submitted(variant: Variant) -> bool:
    """Whether jobs of Slurm train it."""
    return (variant.config.run_folder / LAUNCH_FOLDER).exists()


def is_measured(variant: Variant) -> bool:
    """Whether the trained variant has been evaluated."""
    return (variant.config.run_folder / PERPLEXITY).exists()


def run(comparison: Comparison, say: Callable[[str], None]) -> dict[str, str]:
    """Train and evaluate what is not; returns how those that failed ended, by name.

    Raises StoppedEarly, PreemptedError or KeyboardInterrupt when asked to stop, after the variant under way has
    ended; ConfigError when finished variants were trained with other settings, when another comparison or a job of
    Slurm works on them, or when the comparison's folder holds something else; DataError when the data has changed.
    """
    failed = {}
    with _only_one(comparison.output):
        _refuse_changes(comparison)
        for variant in comparison.variants:
            if not is_trained(variant):
                refuse_active(variant.config.run_folder)
        signal.signal(signal.SIGTERM, _stop)
        for number, variant in enumerate(comparison.variants, 1):
            if is_measured(variant):
                say(f"{variant.name}: finished before")
                continue
            say(f"{variant.name}: {number} of {len(comparison.variants)}, in {variant.config.run_folder}")
            if ending := _train(comparison, variant) or _measure(variant):
                failed[variant.name] = ending
    return failed


def submit_array(comparison: Comparison, options: Mapping[str, str]) -> str:
    """Submit the trainings that are not complete as one array of Slurm jobs; returns its id.

    Raises ConfigError when there is nothing to train, or as `run` and `mesatron launch slurm` do.
    """
    with _only_one(comparison.output):
        _refuse_changes(comparison)
        configs = [variant.config for variant in comparison.variants if not is_trained(variant)]
        if not configs:
            raise ConfigError(f"All variants in {comparison.output} are trained; leave out --slurm to measure them.")
        request = Request({"nodes": "1", **options}, {})
        return submit(plan_array(configs, comparison.output, comparison.name, request))


def _train(comparison: Comparison, variant: Variant) -> str:
    if is_trained(variant):
        return ""
    if is_submitted(variant):
        return "its job has not finished it; --slurm submits it again"
    processes = ["--processes", str(comparison.processes)] if comparison.processes > 1 else []
    return _mesatron("train", str(comparison.base), *variant.arguments, *processes)


def _measure(variant: Variant) -> str:
    file = variant.config.run_folder / PERPLEXITY
    file.parent.mkdir(exist_ok=True)
    return _mesatron("evaluate", "perplexity", str(last_checkpoint(variant)), "--json", str(file))


def _mesatron(*arguments: str) -> str:
    """Run a verb; returns how it failed, or nothing. Raises what ends the comparison if the verb was stopped."""
    process = subprocess.Popen([sys.executable, "-m", "mesatron", *arguments], preexec_fn=end_with_parent)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # A terminal has interrupted the verb too, and torchrun must not be disturbed while it ends.
        try:
            process.wait(INTERRUPT_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
        raise
    except PreemptedError:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    for error in (StoppedEarly, PreemptedError):
        if code == error.exit_code:
            raise error("The training was asked to stop, and so has the comparison; the same command goes on.")
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _stop(*_: int | FrameType | None) -> NoReturn:
    raise PreemptedError("Stopped on SIGTERM; the same command goes on.")


def _refuse_changes(comparison: Comparison) -> None:
    _refuse_other_data(comparison)
    for variant in comparison.variants:
        if not (is_trained(variant) or is_measured(variant)):
            continue
        folder = variant.config.run_folder
        changes = changed_keys(load_config(folder / "config.yaml"), variant.config)
        if not is_submitted(variant):  # a job has as many processes as was asked of Slurm
            trained_with = json.loads((folder / "environment.json").read_text())["world_size"]
            if trained_with != comparison.processes:
                changes["processes"] = trained_with, comparison.processes
        described = "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in changes.items() if key != "runs_folder")
        if described:
            raise ConfigError(
                f"{folder} was trained with other settings than {comparison.file} has for it now ({described}); set "
                "them back, remove that folder, or choose another output."
            )


def _refuse_other_data(comparison: Comparison) -> None:
    """Between two calls somebody may have prepared the folder anew."""
    found: dict[str, str] = {}
    for variant in comparison.variants:
        if fingerprint := _trained_on(variant):
            found[fingerprint] = f"{variant.config.run_folder} was trained on"
        else:
            folder = variant.config.data.folder
            found[load_manifest(folder).fingerprint] = f"{folder} now holds"
    if len(found) > 1:
        one, other, *_ = (f"{whose} {fingerprint[:12]}" for fingerprint, whose in found.items())
        raise DataError(
            f"The losses of {comparison.name} could not be compared: of data by their fingerprints, {one}, but "
            f"{other}; prepare the data again as it was, or choose another output."
        )


def _trained_on(variant: Variant) -> str:
    """The fingerprint of a trained variant's data; empty for one that is not, or that an earlier version measured."""
    if checkpoint := last_checkpoint(variant):
        return str(json.loads((checkpoint / STATE).read_text())["data"]["fingerprint"])
    measured = variant.config.run_folder / PERPLEXITY
    return str(json.loads(measured.read_text()).get("data_fingerprint", "")) if measured.exists() else ""


@contextmanager
def _only_one(output: Path) -> Iterator[None]:
    """Hold the comparison's folder, which is made if need be.

    Raises ConfigError when another process does, and for a folder that holds something but no comparison.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot make {output}: {error.strerror}; choose another output.") from None
    if any(output.iterdir()) and not (output / LOCK).exists():
        raise ConfigError(f"{output.resolve()} holds files of something else; choose another output, or empty it.")
    lock = os.open(output / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"Another comparison is at work in {output}; wait for it.") from None
        yield
    finally:
        os.close(lock)
