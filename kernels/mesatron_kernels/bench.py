"""How fast and how right the Mesa operator is on the machine at hand, beside its peers, in one process.

On a GPU times are those of CUDA events, with the L2 cache cleared before every run outside the timed span; the runs
are queued without waiting, as in training. On a CPU they are those of the clock. Every figure is a median.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mesatron_kernels import accuracy, operator
from mesatron_kernels.accuracy import Keys
from mesatron_kernels.selfcheck import machine
from mesatron_kernels.state import MesaState

CLEARED_BYTES = 256 * 2**20
"""More than any L2 cache holds."""
EXACT_TOKENS, EXACT_HEADS = 4096, 4
"""Errors are measured on a part of the inputs that float64 has room for."""
PREFIX = 512
"""Tokens behind the states that a decode step begins with."""


@dataclass(frozen=True)
class Setting:
    """What to run. dtype is of q, k and v; documents are packed into one row of batch * length tokens, 0 for none."""

    batch: int
    length: int
    heads: int
    head_size: int
    dtype: str
    max_steps: int
    tolerance: float
    inputs: Keys
    gamma: float | None
    lam: float
    documents: int = 0
    cotangent_scale: float = 1.0

    def draw(self, device: torch.device) -> dict[str, Tensor]:
        rows, length = (1, self.batch * self.length) if self.documents else (self.batch, self.length)
        return accuracy.draw_inputs(
            self.inputs, rows, length, self.heads, self.head_size, dtype=getattr(torch, self.dtype), device=device,
            gamma=self.gamma, lam=self.lam,
        )  # fmt: skip

    def bounds(self, device: torch.device) -> Tensor | None:
        """Documents of nearly equal length, int32 [documents + 1]."""
        if not self.documents:
            return None
        tokens = self.batch * self.length
        bounds = [tokens * i // self.documents for i in range(self.documents + 1)]
        return torch.tensor(bounds, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Row:
    """Figures of one contender; those that were not measured are None or empty."""

    name: str
    forward_ms: float | None = None
    total_ms: float | None = None
    """Forward and backward."""
    peak_mib: float | None = None
    """Device memory that forward and backward take beside the inputs, at most."""
    errors: dict[str, float] = field(default_factory=dict)
    """Of o and every gradient, relative to float64."""
    failure: str | None = None


@dataclass(frozen=True)
class DecodeRow:
    """Figures of one contender's decode step."""

    name: str
    batch: int
    solver: str
    milliseconds: float | None = None
    tb_per_second: float | None = None
    """Bytes of the states, each read and written once, per second."""
    error: float | None = None
    """Of o, relative to float64."""
    failure: str | None = None


class Contender(NamedTuple):
    name: str
    operator: Callable[[Setting, Tensor | None], accuracy.Operator]
    is_mesa: bool = True


class Clock:
    """Measures functions on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.repeats = 20 if self.on_gpu else 3
        self._cache = torch.empty(CLEARED_BYTES, dtype=torch.int8, device=device) if self.on_gpu else None

    def median_ms(self, run: Callable[[], object]) -> float:
        """Milliseconds of a run, after two that warm up."""
        run()
        run()
        if self._cache is None:
            return 1e3 * statistics.median(self._seconds(run) for _ in range(self.repeats))
        spans = []
        for _ in range(self.repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._cache.zero_()
            begin.record()
            run()
            end.record()
            spans.append((begin, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(begin.elapsed_time(end) for begin, end in spans)

    def peak_mib(self, run: Callable[[], object]) -> float | None:
        """Device memory that a run takes beside what is there before; None on a CPU."""
        if not self.on_gpu:
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def copy_gb_per_second(self) -> float:
        """Bytes read and written by a large copy."""
        count = (2**30 if self.on_gpu else 2**26) // 4
        source = torch.ones(count, device=self.device)
        target = torch.empty_like(source)
        return 2 * 4 * count / self.median_ms(lambda: target.copy_(source)) / 1e6

    def matmul_tflops(self) -> float:
        """Rate of a large bf16 product."""
        size = 8192 if self.on_gpu else 512
        a, b = torch.randn(2, size, size, device=self.device).to(torch.bfloat16)
        return 2 * size**3 / self.median_ms(lambda: a @ b) / 1e9

    @staticmethod
    def _seconds(run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin


def ours(implementation: str) -> Contender:
    """An implementation of this package."""

    def make(setting: Setting, cu_seqlens: Tensor | None) -> accuracy.Operator:
        def run(q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, lam: Tensor) -> tuple[Tensor]:
            result = operator.mesa(
                q, k, v, log_gamma, beta, lam, cu_seqlens=cu_seqlens, max_steps=setting.max_steps,
                tolerance=setting.tolerance, return_state=False, implementation=implementation,
            )  # fmt: skip
            return (result.o,)

        return run

    return Contender(implementation, make)


def fla_core() -> Contender:
    """fla-core's kernel, which takes `max_steps` steps always."""

    def make(setting: Setting, cu_seqlens: Tensor | None) -> accuracy.Operator:
        from fla.ops.mesa_net import chunk_mesa_net

        bounds = None if cu_seqlens is None else cu_seqlens.long()

        def run(*inputs: Tensor) -> tuple[Tensor]:
            return (chunk_mesa_net(*inputs, max_CG_iteration=setting.max_steps, cu_seqlens=bounds)[0],)

        return run

    return Contender(f"fla {version('fla-core')}", make)


def sdpa() -> Contender:
    """torch's causal softmax attention on the same q, k and v, over whole rows."""

    def make(setting: Setting, cu_seqlens: Tensor | None) -> accuracy.Operator:
        def run(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> tuple[Tensor]:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return (F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2),)

        return run

    return Contender("SDPA", make, is_mesa=False)


def bench_sequence(contenders: Sequence[Contender], setting: Setting, clock: Clock) -> Iterator[Row]:
    """Time, memory and errors of every contender on the same inputs and cotangent; what it raises is its failure."""
    inputs, bounds = setting.draw(clock.device), setting.bounds(clock.device)
    cotangent = _cotangent(setting, inputs["v"])
    part, part_cotangent, part_bounds = _part(inputs, cotangent, bounds)
    precise = {name: x.double() for name, x in part.items()}
    exact = accuracy.outputs_and_gradients(_exactly(part_bounds), precise, [part_cotangent])
    leaves = [x.requires_grad_() for x in inputs.values()]
    for contender in contenders:
        apply = contender.operator(setting, bounds)

        def forward(apply: accuracy.Operator = apply) -> None:
            with torch.no_grad():
                apply(*leaves)

        def both(apply: accuracy.Operator = apply) -> None:
            torch.autograd.grad(apply(*leaves)[0], leaves, cotangent, allow_unused=True)

        try:
            errors = {}
            if contender.is_mesa:
                found = accuracy.outputs_and_gradients(contender.operator(setting, part_bounds), part, [part_cotangent])
                errors = accuracy.relative_errors(found, exact)
            yield Row(contender.name, clock.median_ms(forward), clock.median_ms(both), clock.peak_mib(both), errors)
        except Exception as error:  # whatever a compiler or a driver may raise
            yield Row(contender.name, failure=_one_line(error))


def _cotangent(setting: Setting, v: Tensor) -> Tensor:
    generator = torch.Generator(v.device).manual_seed(1)
    return (setting.cotangent_scale * torch.randn(v.shape, generator=generator, device=v.device)).to(v.dtype)


def _part(
    inputs: dict[str, Tensor], cotangent: Tensor, bounds: Tensor | None
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """The first tokens of the first sequences and heads."""
    tokens = min(cotangent.shape[1], EXACT_TOKENS)
    place = (slice(0, EXACT_TOKENS // tokens), slice(0, tokens), slice(0, EXACT_HEADS))
    part = {name: x[place[2]] if name == "lam" else x[place] for name, x in inputs.items()}
    if bounds is not None:
        bounds = F.pad(bounds[bounds < tokens], (0, 1), value=tokens)
    return {name: x.contiguous() for name, x in part.items()}, cotangent[place].contiguous(), bounds


def _exactly(cu_seqlens: Tensor | None) -> accuracy.Operator:
    def run(q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, lam: Tensor) -> tuple[Tensor]:
        result = operator.mesa(
            q, k, v, log_gamma, beta, lam, cu_seqlens=cu_seqlens, return_state=False, implementation="torch",
            **accuracy.EXACT,
        )  # fmt: skip
        return (result.o,)

    return run


Step = Callable[[accuracy.Solver], Tensor]
"""The o of one decode step."""
SOLVERS: dict[str, accuracy.Solver] = {
    "5 steps": {"max_steps": 5, "tolerance": 0.0},
    "30 steps": {"max_steps": 30, "tolerance": 0.0},
    "to 1e-3": {"max_steps": 30, "tolerance": 1e-3},
}


def bench_decode(implementations: Sequence[str], setting: Setting, clock: Clock) -> Iterator[DecodeRow]:
    """A decode step of `setting.batch` sequences, by SOLVERS.

    implementations: ours, or "fla-core", which has no stop rule. States are those after PREFIX tokens of
    `setting.inputs`, the same for every sequence.
    """
    prefix = replace(setting, batch=1, length=PREFIX).draw(clock.device)
    state = operator.mesa(*prefix.values(), implementation="torch").state or ()
    many = [x.expand(setting.batch, -1, -1, -1).contiguous() for x in state]
    tokens = [x if name == "lam" else x[:, 0] for name, x in replace(setting, length=1).draw(clock.device).items()]
    *rows, lam = (x.contiguous() for x in tokens)
    few = [*(x[:4].double() for x in rows), lam.double(), *(x[:4].double() for x in many)]
    exact = {"o": _our_step("torch", few)(accuracy.EXACT)}
    traffic = 2 * sum(x.numel() * x.element_size() for x in many)
    for name in implementations:
        for title, solver in SOLVERS.items():
            if name == "fla-core" and solver["tolerance"]:
                continue
            try:
                make = _fla_step if name == "fla-core" else partial(_our_step, name)
                step = make([*rows, lam, *many])
                milliseconds = clock.median_ms(partial(step, solver))
                error = accuracy.relative_errors({"o": step(solver)[:4].double()}, exact)["o"]
                yield DecodeRow(name, setting.batch, title, milliseconds, traffic / milliseconds / 1e9, error)
            except Exception as error:
                yield DecodeRow(name, setting.batch, title, failure=_one_line(error))


def _our_step(implementation: str, inputs: Sequence[Tensor]) -> Step:
    q, k, v, log_gamma, beta, lam, H, G = inputs
    state = MesaState(H, G)

    def run(solver: accuracy.Solver) -> Tensor:
        return operator.mesa_step(q, k, v, log_gamma, beta, lam, state, implementation=implementation, **solver).o

    return run


def _fla_step(inputs: Sequence[Tensor]) -> Step:
    from fla.ops.mesa_net import mesa_net_decoding_one_step

    q, k, v, log_gamma, beta, lam, H, G = inputs
    transposed = G.mT.contiguous()

    def run(solver: accuracy.Solver) -> Tensor:
        return mesa_net_decoding_one_step(q, k, v, log_gamma, lam, beta, H, transposed, solver["max_steps"])[0]

    return run


def describe(device: torch.device) -> dict[str, str]:
    """Hardware and versions."""
    if device.type == "cuda":
        return machine(device)
    return {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
