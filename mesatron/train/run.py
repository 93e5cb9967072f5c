"""A run's folder: who may write into it, what it was started with, and where it goes on."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesatron.checkpoint.format import set_aside
from mesatron.checkpoint.retention import remove_leftovers
from mesatron.checkpoint.verify import find_latest
from mesatron.config import Config, changed_keys, dump_config, load_config
from mesatron.errors import CheckpointError, ConfigError
from mesatron.files import replace_file
from mesatron.monitor.attempts import Attempt

# Keys that may change between attempts: what a run computes does not depend on them, beyond rounding.
FREE_KEYS = (
    "name", "runs_folder", "data.input_folder", "data.folder", "data.workers", "data.timeout_seconds",
    "data.cache_folder", "data.cache_limit_bytes", "data.prefetch_batches", "data.token_folder",
    "data.min_document_tokens", "data.max_document_tokens", "data.remove_duplicates",
    "train.micro_batch_size", "train.activation_checkpointing", "train.loss_chunk_tokens", "train.max_skipped_steps",
    "tokenizer.", "parallel.", "checkpoint.", "monitor.", "evaluate.", "model.implementation",
    "model.mesa.implementation",
    "model.mesa.chunk_size",
)  # fmt: skip


# Keys that decide which sequences a step reads; a position in the data means nothing once they change.
FIXED_KEYS = (
    "data.context_length", "data.shuffle", "data.num_canonical_nodes", "data.shuffle_block_size", "train.seed",
    "train.global_batch_size", "data.packing", "data.weights",
)  # fmt: skip


@dataclass(frozen=True)
class ResumePoint:
    """Where an attempt begins: a checkpoint that verifies, or step 0; `notes` say why, a line each."""

    checkpoint: Path | None = None
    step: int = 0
    attempt: str = ""
    notes: list[str] = field(default_factory=list)


class Run:
    """The first process's hold on a run folder, from `open` to `close`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = config.run_folder
        self.attempt: Attempt | None = None
        self._lock: int | None = None

    def open(self, environment: dict[str, Any], allow_changes: bool) -> ResumePoint:
        """Take the folder, decide where to go on and log the attempt.

        Raises ConfigError when another process trains in it or when keys changed that alter the result, unless
        `allow_changes`; CheckpointError when the model itself changed or none of the checkpoints verifies.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"Cannot make the run folder {self.folder}: {error.strerror}; check runs_folder."
            ) from None
        self._take()
        checkpoints = self.folder / "checkpoints"
        latest, skipped = find_latest(checkpoints)
        unreadable = [info for info in skipped if info.path.name.startswith("step-")]
        if latest is None and unreadable:
            newest = unreadable[0]
            raise CheckpointError(
                f"No checkpoint in {checkpoints} verifies ({newest.path.name}: {newest.reason.rstrip('.')}); repair "
                "one or move them away to start from the beginning."
            )
        # Before the first checkpoint there is nothing that other settings could spoil.
        notes = self._compare_config(latest.path, allow_changes) if latest else []
        notes += [f"Passing over {info.path}: {info.reason.rstrip('.')}." for info in skipped]
        step = latest.step if latest else 0
        if step > self.config.train.steps:
            raise ConfigError(
                f"{checkpoints} is at step {step}, beyond train.steps = {self.config.train.steps}; raise train.steps "
                "or start under another name."
            )
        self.attempt = Attempt(self.folder / "attempts.jsonl", step or None)
        notes += [f"Attempt {number} ended without a word: it was killed." for number in self.attempt.killed]
        identifier = f"attempt-{self.attempt.number:04d}"
        remove_leftovers(checkpoints, identifier)
        for info in unreadable:
            if info.status == "damaged":
                notes.append(f"{info.path.name} now lies in {set_aside(info.path, 'damaged', identifier)}.")
        replace_file(self.folder / "config.yaml", [dump_config(self.config).encode()])
        replace_file(self.folder / "environment.json", [json.dumps(environment, indent=1).encode() + b"\n"])
        return ResumePoint(latest.path if latest else None, step, identifier, notes)

    def check_shared(self) -> None:
        """In every process, after the first has opened the run: raise ConfigError where its folder is not seen."""
        if not (self.folder / "attempts.jsonl").exists():
            raise ConfigError(
                f"{self.folder.absolute()} on {os.uname().nodename} is not the folder of the first process; put "
                "runs_folder on a file system that all nodes share."
            )

    def close(self, reason: str, exit_code: int) -> None:
        """Log how the attempt ended and let go of the folder."""
        if self.attempt is not None:
            self.attempt.end(reason, exit_code)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self) -> None:
        # The kernel drops the lock with the process, however it ends.
        self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"Another process trains in {self.folder}; wait for it or choose another name.") from None
        except OSError as error:
            raise ConfigError(
                f"Cannot lock {self.folder} ({error.strerror}); put runs_folder on a file system that has locks."
            ) from None

    def _compare_config(self, checkpoint: Path, allow_changes: bool) -> list[str]:
        changes = changed_keys(load_config(checkpoint / "config.yaml"), self.config)
        described = {key: f"{key}: {old} -> {new}" for key, (old, new) in changes.items()}
        serious = {key: text for key, text in described.items() if not key.startswith(FREE_KEYS)}
        fixed = [text for key, text in serious.items() if key.startswith(FIXED_KEYS)]
        if fixed:
            raise ConfigError(
                f"{self.folder} reads its data in an order that these settings would change ({'; '.join(fixed)}); set "
                "them back or choose another name."
            )
        if serious and not allow_changes:
            model_changed = any(key.startswith("model.") for key in serious)
            error = CheckpointError if model_changed else ConfigError
            what = "holds another model" if model_changed else "was started with other settings"
            raise error(
                f"{self.folder} {what} ({'; '.join(serious.values())}); choose another name, or pass --allow-changes "
                "to go on."
            )
        return [f"Changed since that checkpoint: {text}." for text in described.values()]
