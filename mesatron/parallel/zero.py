"""The model under DeepSpeed: one optimizer step, and its whole state as plain logical tensors.

DeepSpeed keeps fp32 weights and Adam moments in flat shards whose form depends on the ZeRO stage. Only this file knows
those forms: `fragments` says which elements of which parameter this process holds, `restore` fills them again.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

ACCELERATOR = "cuda" if torch.cuda.is_available() else "cpu"
os.environ["DS_ACCELERATOR"] = ACCELERATOR  # DeepSpeed's guess warns

import deepspeed
from deepspeed.accelerator import cpu_accelerator, cuda_accelerator, get_accelerator, set_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, set_z3_leaf_modules
from mesatron_data.batch import Batch
from mesatron_kernels.documents import send_documents, sent
from torch import Tensor, nn

from mesatron.config import Config
from mesatron.errors import ConfigError
from mesatron.model.backbone import Backbone, Block
from mesatron.parallel.layout import Layout, ModelParallelUnit
from mesatron.parallel.seams import SharedSeams
from mesatron.parallel.shares import share_of, shares, whole_parameters
from mesatron.train.timing import PhaseTimer

if get_accelerator().device_name() != ACCELERATOR:  # another package asked before, by an inherited variable or a guess
    set_accelerator(cuda_accelerator.CUDA_Accelerator() if ACCELERATOR == "cuda" else cpu_accelerator.CPU_Accelerator())

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weight", *MOMENTS)
ElementSource = Callable[[str, str, int, int], Tensor]
"""kind (one of KINDS), parameter name, start and stop to these elements of this process's share: flat, fp32, on the
host, with zeros beyond its end."""


@dataclass(frozen=True)
class StepResult:
    """Global gradient norm before clipping, and whether the optimizer moved (not if the norm is not finite)."""

    grad_norm: float
    applied: bool


class ZeroEngine:
    """A share of a Backbone whose optimizer state, gradients and weights are sharded by `parallel.zero_stage`."""

    def __init__(self, config: Config, layout: Layout, accumulation_steps: int) -> None:
        _quiet_deepspeed()
        self.config, self.layout, self.device = config, layout, layout.world.device
        self.accumulation_steps = accumulation_steps
        self.stage = config.parallel.zero_stage
        self.alive: Callable[[], None] = lambda: None
        """Called for every tensor that is restored."""
        self.source_losses = torch.zeros(1, device=self.device)
        """Sums of this process's losses in the last update, by source; as long as there are sources."""
        self.seams = SharedSeams(config, layout)
        self.graph_bytes = 0
        """Memory of recorded passes that no tensor seems to take."""
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        model, unit = self._build()
        if self.stage < 3:
            model = model.to(self.device)
        else:
            set_z3_leaf_modules(model, [Block])  # whose weights are gathered together, not layer by layer
        self.parameters = {self._whole_name(name): parameter for name, parameter in model.named_parameters()}
        local = {name: getattr(p, "ds_shape", p.shape) for name, p in self.parameters.items()}
        self.whole = whole_parameters(config.model)
        self.shares = shares(self.whole, local, layout.tensor)
        self._mark_shares()
        optimizer = self._optimizer()
        with contextlib.redirect_stdout(io.StringIO()):  # in bf16 it prints how much memory there is, again and again
            self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=self._settings(), mpu=unit)

    def _build(self) -> tuple[nn.Module, ModelParallelUnit | None]:
        """This process's share of the model, and the groups to tell DeepSpeed of."""
        copies = self.layout.copies.handle
        unit = ModelParallelUnit(self.layout) if copies else None
        with deepspeed.zero.Init(
            config_dict_or_path=self._settings(), enabled=self.stage == 3, data_parallel_group=copies, mpu=unit
        ):
            return Backbone(share_of(self.config.model, self.layout.tensor.size), self.seams), unit

    def _whole_name(self, name: str) -> str:
        """The name in a whole Backbone of a parameter of this process's model."""
        return name

    def shapes(self) -> dict[str, torch.Size]:
        """Whole shape of every parameter of the model, in an order that is the same in every process."""
        return {name: parameter.shape for name, parameter in self.whole.items()}

    def losses(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`Backbone.forward` of tensors on the host; documents are told apart if the config says so."""
        return self.engine(*self._model_inputs(tokens, targets, cu_seqlens))

    def record(self) -> None:
        """Record the blocks' passes as CUDA graphs, if the config asks for it. All processes call it together.

        Raises ConfigError where there is no GPU, or where a block does what cannot be recorded.
        """
        if not self.config.train.cuda_graphs:
            return
        if self.device.type != "cuda":
            raise self.layout.world.raised_by_all(ConfigError("train.cuda_graphs needs a GPU; set it to false."))
        from mesatron.parallel.graphs import BlockGraphs, CannotRecordError

        world, reason = self.layout.world, None
        blocks = list(self.blocks().values())
        shape = self.seams.residual_shape(self.config.train.micro_batch_size, self.config)
        x = torch.zeros(shape, device=self.device, dtype=next(blocks[0].parameters()).dtype)
        try:
            self.seams.graphs = BlockGraphs(blocks, x, self._in_flight)
            self.graph_bytes = self.seams.graphs.bytes
            torch.cuda.reset_peak_memory_stats(self.device)  # it counts all that was recorded as tensors
        except CannotRecordError as error:
            reason = str(error)
        reasons = world.gather(reason)
        reason = world.from_first(lambda: next(filter(None, reasons), None))
        if reason:
            what = f"A block does what no CUDA graph can hold ({reason}); set train.cuda_graphs to false."
            raise world.raised_by_all(ConfigError(what))

    def release(self) -> None:
        """Give up recorded passes and their memory."""
        if self.seams.graphs is not None:
            self.seams.graphs.release()
            self.seams.graphs, self.graph_bytes = None, 0
            torch.cuda.empty_cache()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """For gradients of `bare_losses`. Blocks run as modules in here, with the memory that recorded passes took."""
        self.release()
        # ZeRO-3 reduces a block's gradients when that of its input is known, whoever asked for it, or zeros.
        reduced = self.engine.optimizer.leaf_parameters if self.stage == 3 else {}
        kept = {block: list(parameters) for block, parameters in reduced.items()}
        for parameters in reduced.values():
            parameters.clear()
        yield
        for block, parameters in kept.items():
            reduced[block].extend(parameters)
        self.record()

    @property
    def _in_flight(self) -> int:
        """Micro-batches that have passed forward and not yet backward, at most."""
        return 1

    def bare_losses(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor) -> Tensor:
        """`losses` whose backward passes, within `apart`, DeepSpeed does not take for a part of a step."""
        autocast = self.config.train.precision == "bf16" and self.stage == 0
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            return self.engine.module(*self._model_inputs(tokens, targets, cu_seqlens))

    def _model_inputs(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor) -> tuple[Tensor | int | None, ...]:
        documents = send_documents(cu_seqlens, self.device) if self.config.data.reset_state_at_documents else None
        chunk_tokens = self.config.train.loss_chunk_tokens
        return self._sent(tokens), self._sent(targets), documents, chunk_tokens

    def _sent(self, tensor: Tensor) -> Tensor:
        return sent(tensor, self.device)

    def blocks(self) -> dict[int, Block]:
        """The blocks that this process computes, by number."""
        return dict(enumerate(self.engine.module.blocks))

    def observed(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """What this process's mixers saw in the last forward pass, see `Backbone.observed`."""
        return self.engine.module.observed()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forward passes in here are no part of training."""
        self.engine.eval()
        yield
        self.engine.train()

    def update(
        self, micro_batches: Sequence[Batch], global_targets: float, lr: float, timer: PhaseTimer
    ) -> tuple[Tensor, StepResult]:
        """One optimizer step on the mean loss over the `global_targets` targets of all processes' micro-batches.

        Returns the sum of this process's losses. A non-finite gradient in any process leaves everything as it was.
        """
        loss_sum = torch.zeros((), device=self.device)
        self.source_losses.zero_()
        for number, micro_batch in enumerate(micro_batches, start=1):
            with timer.phase("forward"):
                losses = self.losses(micro_batch.tokens, micro_batch.targets, micro_batch.cu_seqlens)
                loss = losses.sum()
            with timer.phase("backward"):
                self.backward(loss, global_targets, last=number == len(micro_batches))
            loss_sum += loss.detach()
            self._count_sources(losses, micro_batch.sources)
        self._set_lr(lr)
        with timer.phase("step"):
            return loss_sum, self._step()

    def _count_sources(self, losses: Tensor, sources: Tensor) -> None:
        """Add a micro-batch's losses, [B, T] like the source numbers of its targets, to `source_losses`."""
        numbers = torch.arange(len(self.source_losses), device=self.device)
        belongs = numbers[:, None] == self._sent(sources).flatten()
        self.source_losses += belongs.to(losses.dtype) @ losses.detach().flatten()

    def backward(self, loss_sum: Tensor, global_targets: float, last: bool) -> None:
        """Add the gradients of this process's `loss_sum` / `global_targets`; `last` ends the accumulation.

        DeepSpeed averages gradients over the copies of a parameter, so the loss is first multiplied by their number:
        the result is the gradient of the mean over all targets of the global batch, however it is split.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss_sum * (self.layout.copies.size / global_targets), scale_wrt_gas=False)

    def _set_lr(self, lr: float) -> None:
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = lr

    def _step(self) -> StepResult:
        if self.stage == 0:
            grad_norm = self._grad_norm()
            nn.utils.clip_grads_with_norm_(self.parameters.values(), self.config.train.clip_grad_norm, grad_norm)
            applied = bool(grad_norm.isfinite())
            if not applied:
                self.engine.module.zero_grad(set_to_none=True)  # the optimizer passes over parameters without gradient
            self.engine.step()
            return StepResult(float(grad_norm), applied)
        self.engine.step()
        return StepResult(float(self.engine.get_global_grad_norm()), self.engine.was_step_applied())

    @property
    def optimizer_steps(self) -> int:
        """Updates applied so far, as Adam's bias correction counts them."""
        return int(next(iter(self.engine.basic_optimizer.state.values()))["step"])

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        for state in self.engine.basic_optimizer.state.values():
            state["step"].fill_(steps)

    def fragments(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """What this process saves: kind, parameter name, first element, and the live flat fp32 elements from there on.

        Elements are counted in this process's share; those beyond its end mean nothing. All processes together save
        everything once.
        """
        for name, parameter in self.parameters.items():
            if self._saves(name):
                self.alive()
                for kind in KINDS:
                    yield kind, name, *self._own(parameter, kind, self.layout.copies.size)

    def kept(self, kinds: tuple[str, ...] = KINDS) -> Iterator[tuple[str, str, Tensor]]:
        """Kind, parameter name and live flat fp32 elements of all that this process keeps, whoever has them too."""
        for name, parameter in self.parameters.items():
            for kind in kinds:
                _, own = self._own(parameter, kind)
                yield kind, name, own

    @torch.no_grad()
    def restore_kept(self, source: Callable[[str, str], Tensor]) -> None:
        """Replace what `kept` gives by what `source` gives for kind and name; all processes call it together."""
        self._link_moments()
        for kind, name, own in self.kept():
            self.alive()
            own.copy_(source(kind, name))
        for parameter in self.parameters.values():
            self._refresh(parameter, partial(safe_get_full_fp32_param, parameter))

    @torch.no_grad()
    def restore(self, source: ElementSource, kinds: tuple[str, ...] = KINDS) -> None:
        """Replace what this process holds by elements of `source`; moments exist only after the first optimizer step.

        The number of processes and the ZeRO stage may differ from those that saved them.
        """
        self._link_moments()
        for name, parameter in self.parameters.items():
            self.alive()
            size = self.shares[name].local.numel()
            for kind in kinds:
                start, own = self._own(parameter, kind)
                if kind == "weight" and self.stage in (1, 2):  # whose working copy needs all of it anyway
                    whole = source(kind, name, 0, size)
                    own.copy_(whole[start : start + len(own)])
                    self._refresh(parameter, partial(whole.view, -1))
                    continue
                own.copy_(source(kind, name, start, start + len(own)))
                if kind == "weight":
                    self._refresh(parameter, partial(source, kind, name, 0, size))

    def _mark_shares(self) -> None:
        """Tell DeepSpeed which gradients differ over the tensor group; sum there what each member sees in part."""
        for name, parameter in self.parameters.items():
            replicated = self.shares[name].dimension is None
            parameter.tensor_model_parallel = not replicated  # type: ignore[attr-defined]
            if replicated and self.config.parallel.sequence_parallel:
                parameter.register_hook(self._sum_over_tensor_group)

    def _sum_over_tensor_group(self, gradient: Tensor) -> Tensor:
        total = gradient.float()
        dist.all_reduce(total, group=self.layout.tensor.handle)
        return total.to(gradient.dtype)

    def _grad_norm(self) -> Tensor:
        """The norm of the whole gradient, for stage 0, where DeepSpeed has none: replicated parts counted once."""
        squares = torch.zeros(2, device=self.device)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                squares[int(self.shares[name].dimension is None)] += parameter.grad.float().square().sum()
        if self.layout.tensor.size > 1:
            dist.all_reduce(squares[:1], group=self.layout.tensor.handle)
        return squares.sum().sqrt()

    def _link_moments(self) -> None:
        # DeepSpeed 0.19 links parameters to their moments after the step of the first parameter group, when those of
        # the second do not exist yet, and then never again.
        if self.stage in (1, 2) and self.engine.basic_optimizer.state:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _saves(self, name: str) -> bool:
        """Whether this process's copy of a parameter is the one that is saved; ZeRO's copies share that out."""
        return self.shares[name].dimension is not None or self.layout.tensor.rank == 0

    def _own(self, parameter: Any, kind: str, slices: int = 1) -> tuple[int, Tensor]:
        """First element and live flat fp32 elements of a parameter that this process keeps.

        Stage 0 keeps all of it in every copy: the copies take one of `slices` equal parts each.
        """
        copies, key = self.layout.copies, None if kind == "weight" else kind
        if self.stage == 0:
            own = parameter.detach() if key is None else self.engine.basic_optimizer.state[parameter][key]
            size = -(-own.numel() // slices)
            start = size * copies.rank if slices > 1 else 0
            return start, own.view(-1)[start : start + size]
        if self.stage == 3:
            own, _ = self.engine.optimizer._get_fp32_opt_state_partition(parameter, True, key)
            return copies.rank * len(own), own
        fragment = parameter._hp_mapping
        if fragment is None:
            return 0, torch.empty(0)
        return fragment.lp_fragment_address.start, fragment.get_hp_fragment(key).detach()

    def _refresh(self, parameter: Any, whole: Callable[[], Tensor]) -> None:
        """Bring a parameter's working copies in line with its fp32 elements, all of which `whole` gives."""
        if self.stage in (1, 2):
            parameter.copy_(whole().view_as(parameter))
        elif self.stage == 3:
            _, own = self._own(parameter, "weight")
            parameter.ds_tensor.data.copy_(own)
            if parameter.ds_status == ZeroParamStatus.AVAILABLE:  # kept whole in every process
                parameter.data.copy_(whole().view(parameter.ds_shape))

    def _optimizer(self) -> torch.optim.Optimizer:
        train = self.config.train
        decayed = [p for name, p in self.parameters.items() if self.shares[name].info.weight_decay]
        others = [p for name, p in self.parameters.items() if not self.shares[name].info.weight_decay]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=train.start_lr,
            betas=(train.beta1, train.beta2),
            eps=train.epsilon,
            fused=self.device.type == "cuda",
        )

    def _settings(self) -> dict[str, Any]:
        train, bf16 = self.config.train, self.config.train.precision == "bf16"
        return {
            # In pieces of sequences, as DeepSpeed takes the whole context group for data parallel.
            "train_batch_size": train.global_batch_size * self.layout.context.size,
            "train_micro_batch_size_per_gpu": train.micro_batch_size,
            "gradient_accumulation_steps": self.accumulation_steps,
            # Stage 0 has no norm of its own in fp32; `step` clips there.
            "gradient_clipping": train.clip_grad_norm if self.stage else 0.0,
            "zero_optimization": {"stage": self.stage, "overlap_comm": False}
            | ({"offload_optimizer": {"device": "cpu"}} if self.config.parallel.offload_optimizer else {}),
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW needs no compiler
            # Without shards there is no separate master copy: the weights stay fp32 and autocast makes the activations.
            "bf16": {"enabled": bf16 and self.stage > 0},
            "torch_autocast": {"enabled": bf16 and self.stage == 0, "dtype": "bfloat16"},
            # Micro-batch gradients of 1e-3 of their sum would vanish in bf16's 8 bits.
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            # Under sequence parallelism the processes of a tensor group hold different tokens: nothing to split there.
            "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
            "steps_per_print": None,
            "timers": {"throughput": {"enabled": False}},  # it waits for the GPU at every forward pass
        }


def _quiet_deepspeed() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it warns of skipped steps, which the loop reports
    # It calls collectives by the names that torch 2.11 knows and 2.13 is renaming.
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    # On CPUs DeepSpeed compiles a shared-memory all-reduce at start. It needs a compiler, a process killed meanwhile
    # leaves a lock that stops every later start, and its segments outlive a killed run. An empty table of usable
    # extensions leaves it out; gloo does the work.
    deepspeed.ops.__compatible_ops__ = {}
