"""The training loop, top to bottom: join, open the run, build, rehearse, restore, then step until done."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import deque
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from mesatron_data.batch import IGNORED_TARGET, Batch
from mesatron_data.manifest import Manifest
from mesatron_data.stream import TrainStream, ValidationSet
from torch import Tensor

from mesatron.checkpoint.format import step_name
from mesatron.config import Config, accumulation_steps, data_parallel_size, dump_config
from mesatron.errors import (
    CheckpointError,
    FencedError,
    MesatronError,
    NonFiniteError,
)
from mesatron.evaluate.perplexity import measure
from mesatron.kernel_choice import choose_kernels, with_kernels
from mesatron.metrics import perplexity
from mesatron.monitor.progress import Log, Progress, Reading
from mesatron.monitor.stragglers import Stragglers
from mesatron.monitor.writer import Monitor
from mesatron.parallel import distributed
from mesatron.parallel.distributed import World
from mesatron.parallel.engine import build_engine
from mesatron.parallel.layout import lay_out
from mesatron.train.announcement import announcement
from mesatron.train.data import open_data
from mesatron.train.environment import describe_environment
from mesatron.train.faults import as_reported, stopped
from mesatron.train.figures import by_source, checksum, count_sources, memory, observe
from mesatron.train.local import drop_local, find_local, make_local_saver
from mesatron.train.nonfinite import dump_first_bad_layer
from mesatron.train.profile import describe, profiled
from mesatron.train.run import ResumePoint, Run
from mesatron.train.saver import Hooks
from mesatron.train.schedule import learning_rate
from mesatron.train.snapshot import StartState, fill_for_rehearsal, generator_states, make_saver
from mesatron.train.spikes import Rewind, SpikeDetector
from mesatron.train.stop import StopFlag, agreed
from mesatron.train.timing import PhaseTimer
from mesatron.train.watchdog import Watchdog


def train(config: Config, stop: StopFlag, stop_at_step: int | None = None, allow_changes: bool = False) -> None:
    """Train the run that `config` describes, from its newest checkpoint on if it has one, to its last step.

    Runs in every process. Once any of them has been asked to stop, all save the same step and raise StoppedEarly or
    PreemptedError; `stop_at_step` saves there and raises StoppedEarly. Faults are raised as mesatron.errors has them.
    In every case attempts.jsonl says how the attempt ended.
    """
    world = distributed.start(config.train.watchdog_seconds)
    run = Run(config, stop)
    stacks = config.run_folder / "stacks"
    watchdog = Watchdog(world, config.train.watchdog_seconds, stacks / f"starting-rank-{world.rank}.txt", run.close)
    reason, exit_code, together = "finished", 0, True
    trainer: Trainer | None = None
    try:
        watchdog.begin("opening the run", START_SECONDS)
        environment = world.from_first(lambda: describe_environment(world))
        local, passed_over = find_local(config, world)
        start = world.from_first(lambda: run.open(environment, allow_changes, local, watchdog.tick), watchdog.tick)
        start.notes.extend(passed_over)
        run.check_shared()
        watchdog.path = stacks / f"{start.attempt}-rank-{world.rank}.txt"
        if stop_at_step and start.step >= stop_at_step and start.step < config.train.steps and not start.local:
            raise world.raised_by_all(stopped(start.step, config))
        if start.step < config.train.steps:
            own = local.path if local and start.local else start.checkpoint
            trainer = Trainer(config, world, run, watchdog, start, own, environment, allow_changes)
            trainer.train(stop_at_step)
        elif world.is_first:
            Log().print(f"{config.run_folder} is complete: step {start.step} of {config.train.steps} is saved.")
    except BaseException as error:
        watchdog.leave_end_to_it()
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal and a launcher may both have sent it
        fault = as_reported(error, config, world)
        unforeseen = 130 if isinstance(error, KeyboardInterrupt) else 1
        reason, exit_code = str(fault) or type(fault).__name__, getattr(fault, "exit_code", unforeseen)
        together = getattr(fault, "in_all_processes", False)
        if fault is not error:
            raise fault from error
        raise
    finally:
        run.close(reason, exit_code)
        if together:  # else no further collective: the others may be gone
            world.barrier()  # whoever leaves first ends the others, who may still be writing
            if trainer:
                trainer.release()
            distributed.stop()
        watchdog.close()


START_SECONDS = 1800.0
"""The watchdog waits at least so long for what compiles kernels or reads a shard, as long as all processes live."""
PROBE_SEQUENCES = 8
PROBE_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-3}
"""Largest relative change of the probe's loss between saving and resuming: rounding of another layout."""


class Trainer:
    """One attempt at a run, in one of its processes, for which `checkpoint` is what `start` goes on from."""

    def __init__(
        self, config: Config, world: World, run: Run, watchdog: Watchdog, start: ResumePoint, checkpoint: Path | None,
        environment: dict[str, Any], allow_changes: bool,
    ) -> None:  # fmt: skip
        watchdog.begin("checking data and kernels", START_SECONDS)
        self.texts = {"config.yaml": dump_config(config), "environment.json": json.dumps(environment, indent=1) + "\n"}
        self.kernels = world.from_first(lambda: choose_kernels(config, world.device))
        self.config = with_kernels(config, self.kernels)
        self.world, self.run, self.watchdog, self.start = world, run, watchdog, start
        self.checkpoint, self.allow_changes = checkpoint, allow_changes
        data_size = world.from_first(lambda: data_parallel_size(config, world.size))
        self.accumulation_steps = world.from_first(lambda: accumulation_steps(config, data_size))
        self.layout = lay_out(config, world)
        self.manifest: Manifest = world.from_first(lambda: open_data(config, watchdog.tick), watchdog.tick)
        self.stragglers = Stragglers(config.monitor.straggler_ratio, world.gather(os.uname().nodename))
        self.timer = PhaseTimer(world.device, lambda phase: watchdog.begin(f"in {phase} of step {self.step + 1}"))
        self.step = start.step
        self.ending: type[MesatronError] | None = None
        self.spike: int | None = None  # the first step of one that the run has to go back from

    def train(self, stop_at_step: int | None) -> None:
        """Train from the resume point to `stop_at_step` or the last step."""
        # Backward passes in this thread: in autograd's own, Python took 1.4 times as long (docs/results.md).
        torch.autograd.set_multithreading_enabled(False)
        last_step = min(self.config.train.steps, stop_at_step or self.config.train.steps)
        self.watchdog.begin("building the model", START_SECONDS)
        self.engine = build_engine(self.config, self.layout, self.accumulation_steps)
        self.engine.alive = self.watchdog.tick
        self.engine.source_losses = torch.zeros(len(self.manifest.sources), device=self.world.device)
        fill_for_rehearsal(self.engine)
        self.engine.record()
        self._rehearse()
        self._train_from_start(last_step)
        while self.spike is not None:
            self._go_back(self.spike)
            self._train_from_start(last_step)
        if self.step < self.config.train.steps:
            error = self.run.stop.error(self.ending, self.step, self.config) if self.ending else None
            raise self.world.raised_by_all(error or stopped(self.step, self.config))

    def release(self) -> None:
        """Give up what would keep NCCL from ending."""
        if hasattr(self, "engine"):
            self.engine.release()

    def _train_from_start(self, last_step: int) -> None:
        """Train from `self.start` to `last_step`, an agreed end or a spike."""
        with ExitStack() as stack:
            self.watchdog.begin("restoring")
            origin = StartState(self.checkpoint, self.engine, self.config, self.start.local)
            origin.restore(self.world)
            self._restore_counts(origin.state)
            self.watchdog.begin("opening data and figures", START_SECONDS)
            self._open_data(origin.state)
            stack.callback(self.stream.close)
            if self.world.is_first:
                monitor = Monitor(self.config.run_folder, self.start.step, self.run.fence)
                self.monitor = stack.enter_context(monitor)
                self.progress = stack.enter_context(Progress(self.config.train.steps, self.start.step))
                for line in announcement(
                    self.config, self.start, self.kernels, self.layout, self.accumulation_steps, self.stream
                ):
                    self.progress.say(line)
            hooks = Hooks(fence=self.run.fence, say=self._say, alive=self.watchdog.tick)
            saving = self.config, self.world, self.engine, self.start.attempt, hooks
            self.saver = stack.enter_context(make_saver(*saving))
            if self.config.checkpoint.local_folder:
                self.local_saver = stack.enter_context(make_local_saver(*saving, self.start.step))
            self._check_probe(origin.state.get("probe_loss"))
            self.ending = agreed(self.world.sum(*self.run.stop.votes()))
            self.run.ready(self.step, origin.state.get("seconds", {}))
            if self.step == 0 and not self.ending:
                self._validate()
            while self.step < last_step and self._train_step():
                if self._due(self.config.evaluate.every_steps):
                    self._validate()
                if self._due(self.config.checkpoint.every_steps) or self.step == last_step:
                    with self.run.ledger.during("checkpoint"):
                        self._save()
                elif self.config.checkpoint.local_folder and self._due(self.config.checkpoint.local_every_steps):
                    with self.run.ledger.during("checkpoint"):
                        self._save_locally()
            if self.ending is FencedError:
                fenced = self.run.stop.error(FencedError, self.step, self.config)
                self._decide(str(fenced))
                raise self.world.raised_by_all(fenced)
            if self.spike is None and self.step > self.saved_step:
                with self.run.ledger.during("checkpoint"):
                    self._save()
            if self.world.is_first and self.spike is None:
                self._say(f"time       {self.run.goodput().describe()}")

    def _restore_counts(self, state: dict[str, Any]) -> None:
        """Put in place what is neither tensors nor data of a checkpoint's state, which is empty for a fresh start."""
        self.step = self.logged_step = self.start.step
        self.saved_step = 0 if self.start.local else self.start.step  # for all nodes to see
        self.spike = None
        self.tokens_seen = state.get("tokens_seen", 0)
        self.skipped_steps, self.skipped_in_a_row = state.get("skipped_steps", 0), state.get("skipped_in_a_row", 0)
        self.detector = SpikeDetector(self.config.train, state.get("recent_losses", ()), state.get("steps_over", 0))
        # Numbers of the last steps' global batches, as far as a spike may reach back.
        self.history: deque[int] = deque(state.get("recent_batches", ()), self.config.train.spike_steps + 1)
        # The last step's loss is judged with the next one's sums, as if one process had computed all of it.
        loss_sum, self.targets = state.get("last_loss", (0.0, 0.0))
        self.own_loss_sum = float(loss_sum) if self.layout.copies.rank == 0 else 0.0
        self.seconds_since_log = 0.0

    def _go_back(self, first_step: int) -> None:
        """Agree on where to go on after a spike that began at `first_step`, and on the batches to leave out."""
        self.watchdog.begin("going back", START_SECONDS)
        del self.saver  # and its host memory; the next one takes as much
        if self.config.checkpoint.local_folder:
            del self.local_saver
            drop_local(self.config, self.world, first_step - 1, self.start.attempt)
        # The update before it may have been the bad one.
        suspects = list(self.history)[first_step - 2 - self.step :]
        samples = {sample for number in suspects for sample in self.stream.global_batch(number)}
        spike = Rewind(first_step, self.step, 0, suspects, sorted(samples))
        what = self.detector.describe(first_step, self.loss)
        alive = self.watchdog.tick
        self.start = self.world.from_first(lambda: self.run.go_back(self.start.attempt, spike, what, alive), alive)
        self.checkpoint = self.start.checkpoint

    def _next_batch(self) -> Batch:
        """This process's share of the next global batch that is not left out."""
        while _batch_number(self.stream) in self.start.skipped.batches:
            next(self.stream)
        return next(self.stream)

    def _train_step(self) -> bool:
        """One optimizer step on one global batch; False if all have agreed to end before it, or to go back."""
        begin = time.perf_counter()
        with self.timer.phase("data"), self.run.ledger.during("data"):
            batch = self._next_batch()
        micro_batches = [self.layout.piece(part) for part in batch.split(self.config.train.micro_batch_size)]
        own_targets = float(sum((part.targets != IGNORED_TARGET).sum() for part in micro_batches))
        own_checksum = checksum(batch.sample_ids) / self.layout.context.size
        targets, samples_checksum, loss_sum_before, failed, *votes = self.layout.sum(
            own_targets, own_checksum, self.own_loss_sum, from_all=[float(self.saver.failed), *self.run.stop.votes()]
        )
        if failed:
            self.saver.finish()  # raises why
        self.saver.report()
        if self.config.checkpoint.local_folder:
            self.local_saver.report()
        self.ending = agreed(votes)
        if self.targets:  # of the step before; 0 without one, or if its checkpoint does not know
            self.loss = loss_sum_before / self.targets
            self.spike = None if self.ending else self.detector.note(self.step, self.loss)
        if self.ending or self.spike:
            return False
        lr = learning_rate(self.config.train, self.step + 1)
        with self._profiled(self.step + 1) as profile:
            loss_sum, result = self.engine.update(micro_batches, targets, lr, self.timer)
        self.step += 1
        if profile and self.world.is_first:
            self.monitor.scalars(self.step, profile)
            self._say(f"step {self.step}: {describe(profile)}")
        self.own_loss_sum, self.targets = float(loss_sum), targets
        self.history.append(_batch_number(self.stream) - 1)
        self.data_state = self.stream.state_dict()
        self.tokens_seen += self.config.tokens_per_step
        self.seconds_since_log += time.perf_counter() - begin
        self._count_skipped(result.applied, micro_batches, targets)
        if self._due(self.config.monitor.log_every_steps):
            phases = self.timer.read()
            own = [0.0] * (3 * self.world.size)
            used = memory(self.world.device, self.engine.graph_bytes)
            own[self.world.rank :: self.world.size] = phases["data"] + phases["forward"], *used
            names = self.manifest.sources
            global_loss_sum, *sums = self.layout.sum(
                self.own_loss_sum, *self.engine.source_losses.tolist(), *count_sources(micro_batches, len(names)),
                from_all=own,
            )  # fmt: skip
            observed, distributions = observe(
                self.engine, self.layout, self._due(self.config.monitor.histogram_every_steps)
            )
            if self.world.is_first:
                losses, counts, sums = sums[: len(names)], sums[len(names) : 2 * len(names)], sums[2 * len(names) :]
                seconds, peaks, in_use = (sums[i * self.world.size :][: self.world.size] for i in range(3))
                lag, slow = self.stragglers.note(seconds)
                observed |= by_source(names, losses, counts, self.stream.shares) | lag
                observed["memory/peak_bytes"] = max(peaks)
                if any(in_use):
                    observed["memory/device_bytes"] = max(in_use)
                self._log(
                    global_loss_sum / targets, lr, result.grad_norm, samples_checksum, phases, observed, distributions
                )
                for line in slow:
                    self._say(f"step {self.step}: {line}")
        return True

    def _profiled(self, step: int) -> AbstractContextManager[dict[str, float]]:
        if step != self.config.monitor.profile_step:
            return nullcontext({})
        name = f"{step_name(step)}-{self.start.attempt}-rank-{self.world.rank}.json.gz"
        file = self.config.run_folder / "profile" / name
        return profiled(file, self.world.device, self.world.barrier, self.watchdog.tick)

    def _count_skipped(self, applied: bool, micro_batches: list[Batch], targets: float) -> None:
        if applied:
            self.skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        what = f"the gradient is not finite, so the update is skipped ({self.skipped_steps} so far)"
        if self.config.train.dump_nonfinite and self.skipped_in_a_row == 1:
            self.world.from_first(self.run.fence)
            what += "; " + dump_first_bad_layer(
                self.engine, self.layout, self.config, micro_batches, targets, self.step, self.watchdog.tick
            )
        self._decide(what)
        if self.skipped_in_a_row >= self.config.train.max_skipped_steps:
            diverged = NonFiniteError(
                f"The last {self.skipped_in_a_row} gradients up to step {self.step} were not finite; "
                "lower train.peak_lr, or raise train.max_skipped_steps to go on from the last checkpoint."
            )
            raise self.world.raised_by_all(diverged)

    def _validate(self) -> None:
        """Perplexity of the current weights on held-out text, in all processes together."""
        self.watchdog.begin(f"validating after step {self.step}")
        with self.engine.evaluating(), self.run.ledger.during("validation"):
            result = measure(self._watched_losses, iter(self.validation), self.manifest, self.layout)
        if self.world.is_first:
            by_source = {f"validation/loss_by_source/{name}": loss for name, loss in result.loss_by_source.items()}
            overall = {"validation/loss": result.loss, "validation/perplexity": result.perplexity}
            self.monitor.scalars(self.step, overall | by_source)
            self._say(f"step {self.step}: validation loss {result.loss:.4f}, perplexity {result.perplexity:.2f}")

    def _watched_losses(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor) -> Tensor:
        self.watchdog.tick()
        return self.engine.losses(tokens, targets, cu_seqlens)

    def _probe(self) -> float | None:
        """The loss on a few held-out sequences, the same ones in every layout; None if it is not finite."""
        with self.engine.evaluating():
            loss = measure(
                self._watched_losses, self.validation.first(PROBE_SEQUENCES), self.manifest, self.layout
            ).loss
        return loss if math.isfinite(loss) else None

    def _check_probe(self, saved: float | None) -> None:
        """Prove that the weights arrived: the checkpoint's own loss must come out again, whatever layout wrote it."""
        if saved is None:
            return
        found, tolerance = self._probe(), PROBE_TOLERANCES[self.config.train.precision]
        if found is not None and abs(found - saved) <= tolerance * saved:
            return
        difference = f"{self.start.checkpoint} gives a loss of {found} on {PROBE_SEQUENCES} held-out sequences"
        if self.allow_changes:
            self._say(f"note       {difference}; it was {saved} when it was saved.")
            return
        error = CheckpointError(
            f"{difference}, but {saved} was saved with it: other weights are in place than were saved; use another "
            "checkpoint, or pass --allow-changes if settings changed that explain it."
        )
        raise self.world.raised_by_all(error)

    def _save(self) -> None:
        """A checkpoint of this step; what was recorded up to it reaches the disk first, or a kill would lose points."""
        self.watchdog.begin(f"saving step {self.step}")
        self.world.from_first(lambda: self.monitor.flush())
        state = self._state() | {"probe_loss": self._probe()}
        self.saver.save(self.step, generator_states(self.world), state, self.texts)
        self.saved_step = self.step

    def _save_locally(self) -> None:
        """The same on this node; as only this layout can go on from it, there is nothing to prove with a loss."""
        self.watchdog.begin(f"saving step {self.step} on the nodes")
        self.world.from_first(lambda: self.monitor.flush())
        self.local_saver.save(self.step, generator_states(self.world), self._state(), self.texts)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors; all processes call it together."""
        # Equal to the last bit to what the next step would find: float64 adds up numbers of fp32 without rounding.
        (loss_sum,) = self.layout.sum(self.own_loss_sum)
        return {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "seconds": self.run.ledger.read(),
            "recent_losses": self.detector.recent,
            "recent_batches": list(self.history),
            "steps_over": self.detector.over,
            "last_loss": [str(loss_sum), self.targets],  # a string, as JSON has no infinity
            "optimizer_steps": self.engine.optimizer_steps,
            "data": self.data_state,
            "tokenizer_sha256": self.manifest.tokenizer_sha256,
            "world_size": self.world.size,
            "attempt": self.start.attempt,
        }

    def _rehearse(self) -> None:
        """A throw-away optimizer step on random tokens: running out of memory shows now, and the moments come to be.

        Whatever it changes is overwritten by the restore that follows.
        """
        train, length = self.config.train, self.config.data.context_length // self.layout.context.size
        generator = torch.Generator().manual_seed(self.layout.copies.rank)
        shape = train.micro_batch_size, length
        tokens = torch.randint(self.config.model.vocabulary_size, shape, generator=generator)
        bounds = torch.arange(train.micro_batch_size + 1, dtype=torch.int32) * length
        batch = Batch(tokens, tokens, bounds, torch.zeros_like(tokens), torch.zeros(train.micro_batch_size))
        # With accumulation the second pass runs beside the gradients of the first; a pipeline knows no shorter step.
        passes = self.accumulation_steps if self.layout.pipeline.size > 1 else min(2, self.accumulation_steps)
        targets = float(train.global_batch_size * self.config.data.context_length)
        timer = PhaseTimer(
            self.world.device, lambda phase: self.watchdog.begin(f"rehearsing the {phase} of a step", START_SECONDS)
        )
        self.engine.update([batch] * passes, targets, 0.0, timer)

    def _open_data(self, state: dict[str, Any]) -> None:
        data, evaluate = self.config.data, self.config.evaluate
        reading: dict[str, Any] = {
            "workers": data.workers, "prefetch_batches": data.prefetch_batches,
            "timeout_seconds": data.timeout_seconds, "cache_folder": data.cache_folder,
            "cache_limit_bytes": data.cache_limit_bytes,
        }  # fmt: skip
        self.stream = TrainStream(
            data.folder, self.config.train.global_batch_size, self.layout.data.rank, self.layout.data.size,
            seed=self.config.train.seed, shuffle=data.shuffle, num_canonical_nodes=data.num_canonical_nodes,
            shuffle_block_size=data.shuffle_block_size, weights=data.weights, **reading,
        )  # fmt: skip
        self.validation = ValidationSet(
            data.folder, evaluate.micro_batch_size, self.layout.data.rank, self.layout.data.size,
            max_samples=evaluate.max_sequences or None, **reading,
        )  # fmt: skip
        if "data" in state:
            self.stream.load_state_dict(state["data"])
        self.data_state = self.stream.state_dict()

    def _due(self, every_steps: int) -> bool:
        return self.step % every_steps == 0 or self.step == self.config.train.steps

    def _say(self, text: str) -> None:
        if self.world.is_first:
            self.progress.say(text)

    def _decide(self, what: str) -> None:
        """Say and log what the run has decided by itself."""
        self._say(f"step {self.step}: {what}")
        self.run.decide(self.step, what)

    def _log(
        self, loss: float, lr: float, grad_norm: float, samples_checksum: float, phases: dict[str, float],
        observed: dict[str, float], distributions: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """The step's figures, to TensorBoard, metrics.jsonl and the terminal."""
        seconds, steps = self.seconds_since_log, self.step - self.logged_step
        tokens_per_second = steps * self.config.tokens_per_step / seconds
        scalars = {
            "train/loss": loss,
            "train/perplexity": perplexity(loss),
            "train/learning_rate": lr,
            "train/grad_norm": grad_norm,
            "train/tokens": float(self.tokens_seen),
            "train/tokens_per_second": tokens_per_second,
            "train/skipped_steps": float(self.skipped_steps),
            "data/samples_checksum": samples_checksum,
        }
        if self.config.train.spike_sigma:
            scalars["train/rewinds"] = float(len(self.start.skipped.rewinds))
        scalars |= {f"time/{phase}_seconds": total / steps for phase, total in phases.items()}
        scalars |= {f"storage/{name}": value for name, value in self.stream.figures().items()} | self.saver.figures
        self.monitor.scalars(self.step, scalars | observed)
        for tag, values in distributions.items():
            self.monitor.histogram(self.step, tag, values)
        data_share = phases["data"] / seconds
        self.progress.update(Reading(self.step, loss, lr, grad_norm, tokens_per_second, data_share))
        self.logged_step, self.seconds_since_log = self.step, 0.0


def _batch_number(stream: TrainStream) -> int:
    """The global batch that `stream` hands out next, counted from 0 over all epochs."""
    position = stream.state_dict()
    return position["epoch"] * stream.steps_per_epoch + position["step_in_epoch"]
