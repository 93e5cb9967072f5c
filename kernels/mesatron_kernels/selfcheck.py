"""Whether the Triton kernels are right on the GPU at hand: every gradient against float64, once per GPU and versions.

Triton 3.4 to 3.7.0 can compile a kernel for Hopper whose output is right and whose gradients are not, so nothing but
running them tells. What was found is kept in `${XDG_CACHE_HOME:-~/.cache}/mesatron`, a file for each pair of dtype and
head size under a name that changes with the GPU, torch, Triton and the source of the kernels. A file is written in one
step and only ever by what it says, so processes that start together may all check and write.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mesatron_kernels import accuracy, operator
from mesatron_kernels.state import MesaState

LIMITS = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 2e-4}
"""Largest relative error by the dtype of q, k and v."""
HEAD_SIZES = (64, 128)
"""Those that are meant to be fast; others are checked when they are asked for."""
LENGTH = 200
"""Tokens of a check: several chunks, the last one short."""
BOUNDS = (0, 3, 3, 70, LENGTH)
SOLVER: accuracy.Solver = {"max_steps": 60, "tolerance": 1e-6}


@dataclass(frozen=True)
class PairCheck:
    """What came of one dtype (of q, k and v) and head size."""

    dtype: str
    head_size: int
    errors: dict[str, float]
    """Largest relative error of each output and gradient, "step o" for the decode step; empty if something failed."""
    failure: str | None
    """Why the pair must not be used; None if all is well."""
    seconds: float


@dataclass(frozen=True)
class SelfCheck:
    """What was checked, on what."""

    machine: dict[str, str]
    """GPU, its compute capability, torch, triton, and a hash of the kernels' source."""
    pairs: tuple[PairCheck, ...]

    @property
    def passed(self) -> bool:
        return all(pair.failure is None for pair in self.pairs)


def selfcheck(force: bool = False, device: torch.device | str = "cuda") -> SelfCheck:
    """Check every dtype at the head sizes that are meant to be fast; what is known already is not run again.

    force: run again all the same. Raises ValueError where there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("The self-check of the Mesa kernels needs a GPU, and none is visible here.")
    device = _with_index(torch.device(device))
    pairs = [(dtype, size) for dtype in LIMITS for size in HEAD_SIZES]
    if force:
        for pair in pairs:
            with suppress(OSError):
                _record(*pair, device).unlink()
        _forget()
    _check_in_parallel([pair for pair in pairs if _recall(*pair, device) is None], device)
    _recall.cache_clear()
    return SelfCheck(machine(device), tuple(check_pair(*pair, device) for pair in pairs))


def _check_in_parallel(pairs: list[tuple[torch.dtype, int]], device: torch.device) -> None:
    """Check each pair in a process of its own, which keeps the verdict: compiling takes most of the time, a part of it
    under Python's lock.

    A pair that leaves no verdict (a GPU may be lent to one process alone) is for the caller to check.
    """
    code = "import torch; from mesatron_kernels.selfcheck import check_pair; check_pair({}, {}, torch.device('{}'))"
    children: list[subprocess.Popen] = []
    try:
        for pair in pairs:
            command = [sys.executable, "-c", code.format(*pair, device)]
            children.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for child in children:
            child.wait()
    finally:
        for child in children:
            child.kill()
            child.wait()


def check_pair(dtype: torch.dtype, head_size: int, device: torch.device) -> PairCheck:
    """What is known of one pair, which is checked now if that is nothing."""
    return _check_pair(dtype, head_size, _with_index(device))


def refusal(dtype: torch.dtype, head_size: int, device: torch.device) -> str | None:
    """Why a pair is known to be bad; None if it is good, or was never checked."""
    known = _recall(dtype, head_size, _with_index(device))
    return known.failure if known else None


# Memories of what the files say: an operator's every call may ask.
@functools.cache
def _check_pair(dtype: torch.dtype, head_size: int, device: torch.device) -> PairCheck:
    known = _recall(dtype, head_size, device)
    if known is None:
        known = run_pair(dtype, head_size, device)
        if known.errors:  # what could not be run, as for want of memory, may run another time
            _write(_record(dtype, head_size, device), known)
            _recall.cache_clear()
    return known


@functools.cache
def _recall(dtype: torch.dtype, head_size: int, device: torch.device) -> PairCheck | None:
    return _read(_record(dtype, head_size, device))


def _forget() -> None:
    _check_pair.cache_clear()
    _recall.cache_clear()


def run_pair(dtype: torch.dtype, head_size: int, device: torch.device) -> PairCheck:
    """Run the kernels for one pair, forward, backward and decode step, and compare with float64.

    Takes no notice of autocast and inference mode, and leaves the generators of random numbers as they are.
    """
    begin = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # raises here if something before has spoilt the GPU for this process
    errors: dict[str, float] = {}
    failure = None
    try:
        # Triton launches on the current GPU, whichever the tensors are on.
        with (
            torch.accelerator.device_index(device.index),
            torch.inference_mode(False),
            torch.autocast(device.type, enabled=False),
        ):
            if device.type == "cuda":
                # In a context of its own: Triton leaves its mode set there if it is interrupted.
                contextvars.copy_context().run(
                    _compile_at_once, lambda: [case(dtype, head_size, device) for case in CASES]
                )
            for case in CASES:
                for name, error in case(dtype, head_size, device).items():
                    errors[name] = max(error, errors.get(name, 0.0))
    except Exception as error:  # whatever a compiler or a driver may raise
        errors = {}
        failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    limit = LIMITS[dtype]
    wrong = [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= limit]
    if wrong:
        failure = f"off from float64 by more than {limit:.0e}: {', '.join(wrong)}"
    return PairCheck(dtype_name(dtype), head_size, errors, failure, round(time.perf_counter() - begin, 1))


def _one_hard_sequence(dtype: torch.dtype, head_size: int, device: torch.device) -> dict[str, float]:
    """Keys and gates for which H is large beside Lambda, and a cotangent as small as a mean loss makes it."""
    inputs = accuracy.draw_inputs("lowrank", 1, LENGTH, 2, head_size, dtype=dtype, device=device, gamma=0.999, lam=0.25)
    scale = 1.0 if dtype == torch.float16 else 1e-6  # float16 has no such numbers
    return _errors(inputs, None, scale)


def _documents_with_states(dtype: torch.dtype, head_size: int, device: torch.device) -> dict[str, float]:
    inputs = accuracy.draw_inputs("silu", 1, LENGTH, 2, head_size, dtype=dtype, device=device)
    inputs |= accuracy.draw_states(len(BOUNDS) - 1, 2, head_size, device=device)
    return _errors(inputs, torch.tensor(BOUNDS, dtype=torch.int32, device=device), 1.0)


def _errors(inputs: dict[str, Tensor], cu_seqlens: Tensor | None, scale: float) -> dict[str, float]:
    def apply(implementation: str, solver: accuracy.Solver) -> accuracy.Operator:
        def run(*leaves: Tensor) -> tuple[Tensor, ...]:
            result = operator.forms(implementation).mesa(
                *leaves[:6], initial_state=MesaState(*leaves[6:]) if leaves[6:] else None, cu_seqlens=cu_seqlens,
                chunk_size=64, return_state=True, **solver,
            )  # fmt: skip
            return (result.o, *(result.state or ()))

        return run

    v, heads = inputs["v"], inputs["lam"].shape[0]
    sequences = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    generator = torch.Generator(v.device).manual_seed(2)
    states = [(sequences, heads, v.shape[-1], v.shape[-1])] * 2
    cotangents = [scale * torch.randn(s, generator=generator, device=v.device) for s in (v.shape, *states)]
    cotangents[0] = cotangents[0].to(v.dtype)
    found = accuracy.outputs_and_gradients(apply("triton", SOLVER), inputs, cotangents)
    precise = {name: x.double() for name, x in inputs.items()}
    exact = accuracy.outputs_and_gradients(apply("torch", accuracy.EXACT), precise, cotangents)
    return accuracy.relative_errors(found, exact)


def _decode_step(dtype: torch.dtype, head_size: int, device: torch.device) -> dict[str, float]:
    inputs = accuracy.draw_inputs("silu", 3, 1, 2, head_size, dtype=dtype, device=device, lam=0.25)
    tokens = [x[:, 0] for name, x in inputs.items() if name != "lam"]
    state = accuracy.draw_states(3, 2, head_size, device=device).values()

    def step(implementation: str, given: list[Tensor], solver: accuracy.Solver) -> dict[str, Tensor]:
        q, k, v, log_gamma, beta, lam, H, G = given
        result = operator.forms(implementation).mesa_step(q, k, v, log_gamma, beta, lam, MesaState(H, G), **solver)
        found = (result.o, *(result.state or ()))
        return {f"step {name}": x.double() for name, x in zip(("o", "H", "G"), found, strict=True)}

    given = [*tokens, inputs["lam"], *state]
    precise = [x.double() for x in given]
    return accuracy.relative_errors(step("triton", given, SOLVER), step("torch", precise, accuracy.EXACT))


CASES = (_one_hard_sequence, _documents_with_states, _decode_step)


def _compile_at_once(launches: Callable[[], object]) -> None:
    """Compile every kernel that `launches` would launch, in as many threads as there are cores, and launch none.

    Of 5 s for a kernel the compiler holds Python's lock for 0.3 s. What fails here does so again when it is launched.
    """
    import triton
    from triton.runtime import JITFunction

    # By the launches themselves, for the very variants: Triton's `preload` takes a constant "bf16" for a type.
    caller, run = threading.get_ident(), JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, warmup=warmup or threading.get_ident() == caller, **options)

    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    try:
        with (
            suppress(Exception),
            torch.autograd.set_multithreading_enabled(False),  # the backward pass launches from here too
            triton.AsyncCompileMode(pool, ignore_errors=True),
        ):
            JITFunction.run = compile_only
            launches()
    finally:
        JITFunction.run = run
        pool.shutdown(cancel_futures=True)


def machine(device: torch.device) -> dict[str, str]:
    """All that a verdict depends on beside dtype and head size."""
    import triton

    source = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        source.update(file.read_bytes())
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "gpu": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}", "torch": torch.__version__,
        "triton": triton.__version__, "source": source.hexdigest()[:16],
    }  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_index(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _record(dtype: torch.dtype, head_size: int, device: torch.device) -> Path:
    """The file that says what came of a pair."""
    home = os.path.expanduser("~")  # itself for a user without one, as in a container: then nothing can be kept
    cache = Path(os.environ.get("XDG_CACHE_HOME") or (os.devnull if home == "~" else f"{home}/.cache"))
    key = hashlib.sha256(json.dumps(machine(device), sort_keys=True).encode()).hexdigest()[:16]
    return cache / "mesatron" / f"mesa-{dtype_name(dtype)}-{head_size}-{key}.json"


def _read(path: Path) -> PairCheck | None:
    """What a file says; None if it cannot be read, which makes the check run again."""
    try:
        return PairCheck(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, check: PairCheck) -> None:
    """Keep a verdict; where that is not possible, the next process checks again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(check), file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
