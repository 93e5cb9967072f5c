"""A run's folder: who may write into it, what it was started with, and where it goes on."""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesatron.checkpoint.format import LATEST, point_latest, set_aside
from mesatron.checkpoint.retention import remove, remove_leftovers
from mesatron.checkpoint.verify import Alive, CheckpointInfo, find_latest, list_checkpoints
from mesatron.cluster.job import check_owner
from mesatron.config import Config, changed_keys, dump_config, load_stored_config
from mesatron.config.mixers import SECTIONS
from mesatron.errors import ENDED_AFTER_SAVING, CheckpointError, ConfigError, LossSpikeError, StorageError, refused_path
from mesatron.files import replace_file
from mesatron.monitor.attempts import Attempt, read_attempts
from mesatron.monitor.goodput import Goodput, Ledger, account
from mesatron.monitor.metrics import last_metrics
from mesatron.train.spikes import SKIPPED_FILE, Rewind, Skipped
from mesatron.train.stop import StopFlag

# Keys that may change between attempts: what a run computes does not depend on them, beyond rounding.
FREE_KEYS = (
    "name", "runs_folder", "data.input_folder", "data.folder", "data.workers", "data.timeout_seconds",
    "data.cache_folder", "data.cache_limit_bytes", "data.prefetch_batches", "data.token_folder",
    "data.min_document_tokens", "data.max_document_tokens", "data.remove_duplicates",
    "train.micro_batch_size", "train.activation_checkpointing", "train.cuda_graphs", "train.loss_chunk_tokens",
    "train.max_skipped_steps", "train.watchdog_seconds", "train.dump_nonfinite", "train.spike_sigma",
    "train.spike_steps", "train.max_rewinds",
    "tokenizer.", "parallel.", "checkpoint.", "monitor.", "evaluate.", "launch.", "model.implementation",
    *(f"model.{mixer}.{key}" for mixer in SECTIONS for key in ("implementation", "chunk_size")),
)  # fmt: skip


# Keys that decide which sequences a step reads; a position in the data means nothing once they change.
FIXED_KEYS = (
    "data.context_length", "data.shuffle", "data.num_canonical_nodes", "data.shuffle_block_size", "train.seed",
    "train.global_batch_size", "data.packing", "data.weights",
)  # fmt: skip


SOLE_OWNER = "MESATRON_SOLE_OWNER"
"""Environment variable by which a start of a cluster's job, whose identity it holds, says that no other job has a right
to the run: whoever still holds the lock lives on a node that the cluster has lost, and is fenced off by the new
attempt's number. The start has that right as long as no later one has come."""


@dataclass(frozen=True)
class ResumePoint:
    """Where an attempt begins or goes back to: a checkpoint that verifies, or step 0; `notes` say why, a line each.

    local: `checkpoint` is the first process's part of one that lies on the nodes.
    """

    checkpoint: Path | None = None
    step: int = 0
    attempt: str = ""
    notes: list[str] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)
    local: bool = False


class Run:
    """The first process's hold on a run folder, from `open` to `close`."""

    def __init__(self, config: Config, stop: StopFlag) -> None:
        self.config, self.stop = config, stop
        self.ledger = Ledger({})
        self.folder = config.run_folder
        self.attempt: Attempt | None = None
        self._lock: int | None = None
        self._was_ready = False

    def open(
        self, environment: dict[str, Any], allow_changes: bool, local: CheckpointInfo | None, alive: Alive
    ) -> ResumePoint:
        """Take the folder, decide where to go on and log the attempt; `local` is taken if it is newer. `alive` is
        called now and then while checkpoints are verified.

        Raises ConfigError when another process trains in it or when keys changed that alter the result, unless
        `allow_changes`; CheckpointError when the model itself changed or none of the checkpoints verifies, StorageError
        if that is since one cannot be read; FencedError in a job that has been started again since.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise refused_path(
                error, f"Cannot make the run folder {self.folder}: {error.strerror}", "check runs_folder"
            ) from None
        self._take()
        checkpoints = self.folder / "checkpoints"
        latest, skipped = find_latest(checkpoints, alive=alive)
        unsound = [info for info in skipped if info.path.name.startswith("step-")]
        newer_local = local is not None and (latest is None or local.step > latest.step)
        if newer_local:
            latest = local
        if latest is None and unsound:
            newest = next((info for info in unsound if info.status == "unreadable"), unsound[0])
            what = f"No checkpoint in {checkpoints} verifies ({newest.path.name}: {newest.reason.rstrip('.')})"
            if newest.status == "unreadable":
                raise StorageError(f"{what}; start the same command again once its storage answers.")
            raise CheckpointError(f"{what}; repair one or move them away to start from the beginning.")
        # Before the first checkpoint there is nothing that other settings could spoil.
        notes = compare_with(latest.path, self.config, allow_changes) if latest else []
        notes += [f"Passing over {info.path}: {info.reason.rstrip('.')}." for info in skipped]
        step = latest.step if latest else 0
        if step > self.config.train.steps:
            raise ConfigError(
                f"{checkpoints} is at step {step}, beyond train.steps = {self.config.train.steps}; raise train.steps "
                "or start under another name."
            )
        self.attempt = Attempt(
            self.folder / "attempts.jsonl", step or None, last_metrics(self.folder / "metrics.jsonl")
        )
        for info in unsound:
            self.attempt.decide(step, f"went on without {info.path}: {info.reason.rstrip('.')}")
        removed = self.stop.watch_folder(self.attempt)
        for decision in removed:
            self.attempt.decide(step, decision)
        notes += removed
        notes += [f"Attempt {number} ended without a word: it was killed." for number in self.attempt.killed]
        identifier = f"attempt-{self.attempt.number:04d}"
        left = remove_leftovers(checkpoints, identifier)
        notes += [f"{path} could not be removed yet." for path in left]
        for info in unsound:
            if info.status != "incomplete":
                try:
                    notes.append(f"{info.path.name} now lies in {set_aside(info.path, 'damaged', identifier)}.")
                except OSError as error:
                    notes.append(f"{info.path.name} cannot be set aside: {error.strerror}.")
        replace_file(self.folder / "config.yaml", [dump_config(self.config).encode()])
        replace_file(self.folder / "environment.json", [json.dumps(environment, indent=1).encode() + b"\n"])
        left_out = Skipped.read(self.folder)
        return ResumePoint(latest.path if latest else None, step, identifier, notes, left_out, newer_local)

    def go_back(self, attempt: str, spike: Rewind, what: str, alive: Alive) -> ResumePoint:
        """Undo a spike in the first process: remove the checkpoints from the step before it on, leave its batches out.

        `to_step` and `attempt` of `spike` are found here; `what` describes it, and `alive` is as in `open`. Raises
        LossSpikeError when the run has gone back `train.max_rewinds` times, and when of the checkpoints that were saved
        before the spike none is left.
        """
        self.fence()
        skipped = Skipped.read(self.folder)
        if len(skipped.rewinds) >= self.config.train.max_rewinds:
            raise LossSpikeError(
                f"After step {spike.last_step} {what}, and the run has gone back {len(skipped.rewinds)} times; lower "
                "train.peak_lr, or raise train.max_rewinds or train.spike_sigma to go on."
            )
        checkpoints = self.folder / "checkpoints"
        first_suspect = spike.first_step - 1
        latest, _ = find_latest(checkpoints, first_suspect, alive)
        if latest is None and first_suspect > self.config.checkpoint.every_steps:
            raise LossSpikeError(
                f"After step {spike.last_step} {what}, and no sound checkpoint of before step {first_suspect} is left; "
                "begin under another name with a larger checkpoint.keep_last, or set train.spike_sigma to 0 to go on "
                "from the newest."
            )
        # Newest first: after a kill in between, a resume must not take the end of the spike.
        for info in reversed(list_checkpoints(checkpoints)):
            if info.step >= first_suspect and info.path.name.startswith("step-"):
                remove(info.path, attempt)
        if latest:
            point_latest(checkpoints, latest.path.name)
        else:
            (checkpoints / LATEST).unlink(missing_ok=True)
        spike.to_step = latest.step if latest else 0
        spike.attempt = attempt
        skipped.add(self.folder, spike)
        decision = (
            f"{what}: going back to step {spike.to_step} (rewind {len(skipped.rewinds)} of at most "
            f"{self.config.train.max_rewinds}) and leaving out the global batches {spike.batches[0]} to "
            f"{spike.batches[-1]}, whose sequences are listed in {self.folder / SKIPPED_FILE}"
        )
        self.decide(spike.last_step, decision)
        return ResumePoint(latest.path if latest else None, spike.to_step, attempt, [decision], skipped)

    def check_shared(self) -> None:
        """In every process, after the first has opened the run: raise ConfigError where its folder is not seen."""
        if not (self.folder / "attempts.jsonl").exists():
            raise ConfigError(
                f"{self.folder.absolute()} on {os.uname().nodename} is not the folder of the first process; put "
                "runs_folder on a file system that all nodes share."
            )

    def fence(self) -> None:
        """Raise FencedError once a newer attempt owns the run; called right before anything is committed."""
        if self.attempt is not None:
            self.attempt.check_newest()

    def decide(self, step: int, what: str) -> None:
        """Log, in the first process, a decision that was taken after `step`."""
        if self.attempt is not None:
            self.attempt.decide(step, what)

    def ready(self, step: int, seconds: dict[str, float]) -> None:
        """The first step begins, after `step`; the checkpoint before it has taken `seconds` in all."""
        self.ledger = Ledger(seconds)
        self.ledger.begin()
        if self.attempt is not None and not self._was_ready:
            self.attempt.ready(step)
            self._was_ready = True

    def goodput(self) -> Goodput:
        """Where the run's time went until now; in the first process."""
        return account(read_attempts(self.folder / "attempts.jsonl"), self.ledger.read(), time.time())

    def close(self, reason: str, exit_code: int) -> None:
        """Log how the attempt ended and let go of the folder."""
        if self.attempt is not None:
            self.attempt.end(reason, exit_code, self.ledger.read() if self._was_ready else {})
            if exit_code in ENDED_AFTER_SAVING:
                self.stop.honoured(exit_code)
            self.attempt = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self) -> None:
        owner = os.environ.get(SOLE_OWNER)
        if owner:
            check_owner(self.folder, owner)
        # The kernel drops the lock with the process, however it ends.
        self._lock = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not owner:
                raise ConfigError(
                    f"Another process trains in {self.folder}; wait for it or choose another name."
                ) from None
        except OSError as error:
            raise refused_path(
                error,
                f"Cannot lock {self.folder} ({error.strerror})",
                "put runs_folder on a file system that has locks",
            ) from None


def compare_with(checkpoint: Path, config: Config, allow_changes: bool = False) -> list[str]:
    """What `config` would change in the run that `checkpoint` is of, a line each.

    Raises ConfigError or CheckpointError for changes that alter the result, unless `allow_changes`, and for those that
    would alter the order of the data in any case.
    """
    changes = changed_keys(load_stored_config(checkpoint / "config.yaml"), config)
    described = {key: f"{key}: {old} -> {new}" for key, (old, new) in changes.items()}
    serious = {key: text for key, text in described.items() if not key.startswith(FREE_KEYS)}
    fixed = [text for key, text in serious.items() if key.startswith(FIXED_KEYS)]
    if fixed:
        raise ConfigError(
            f"{config.run_folder} reads its data in an order that these settings would change ({'; '.join(fixed)}); "
            "set them back or choose another name."
        )
    if serious and not allow_changes:
        model_changed = any(key.startswith("model.") for key in serious)
        error = CheckpointError if model_changed else ConfigError
        what = "holds another model" if model_changed else "was started with other settings"
        raise error(
            f"{config.run_folder} {what} ({'; '.join(serious.values())}); choose another name, or pass --allow-changes "
            "to go on."
        )
    return [f"Changed since that checkpoint: {text}." for text in described.values()]
