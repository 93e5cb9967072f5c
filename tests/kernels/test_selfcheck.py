"""The self-check: the real kernels pass it (float32, by the interpreter where there is no GPU), planted mistakes do
not; what it finds is kept, read back and obeyed by `resolve`. The GPU behind kept verdicts is made up."""

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from mesatron_kernels import Implementation, forms, register, resolve, selfcheck

module = importlib.import_module("mesatron_kernels.selfcheck")
GPU = torch.device("cuda", 0)
DEVICE = GPU if torch.cuda.is_available() else torch.device("cpu")
CRASHED = module.PairCheck("bfloat16", 128, {}, "OutOfMemoryError: CUDA out of memory", 1.0)
GOOD = module.PairCheck("bfloat16", 128, {"o": 1e-3}, None, 1.0)
BAD = module.PairCheck(
    "bfloat16", 128, {"o": 1e-3, "dk": 0.5}, "off from float64 by more than 5e-03: dk by 5.0e-01", 1.0
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder of records, of a made-up machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "machine", lambda device: {"gpu": "made up", "source": "0"})
    module._forget()
    yield tmp_path / "mesatron"
    module._forget()


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> list:
    """What the next checks will find; the last entry stays."""
    outcomes = [GOOD]
    monkeypatch.setattr(module, "run_pair", lambda *pair: outcomes.pop(0) if len(outcomes) > 1 else outcomes[0])
    return outcomes


@pytest.fixture
def replace_triton():
    """`replace_triton(form)` puts another sequence form in the place of triton's."""
    kept = forms("triton")
    yield lambda form: register("triton", Implementation(form, kept.mesa_step))
    register("triton", kept)


def test_the_kernels_pass() -> None:
    found = module.run_pair(torch.float32, 16, DEVICE)
    assert found.failure is None
    assert set(found.errors) == {
        *("o", "H", "G", "dq", "dk", "dv", "dlog_gamma", "dbeta", "dlam", "dH_0", "dG_0"),
        *("step o", "step H", "step G"),
    }
    assert 0 < min(found.errors.values()) <= max(found.errors.values()) <= 2e-4


def test_a_wrong_gradient_is_found(replace_triton) -> None:
    def wrong(q, k, *rest, **options):
        """Right in value; the gradient of k is 1 % too large."""
        return forms("torch").mesa(q, 1.01 * k - (0.01 * k).detach(), *rest, **options)

    replace_triton(wrong)
    found = module.run_pair(torch.float32, 16, DEVICE)
    assert "more than 2e-04: dk by 1.0e-02" in found.failure
    assert "o by" not in found.failure


def test_a_value_that_is_not_finite_and_a_crash_are_failures(replace_triton) -> None:
    replace_triton(lambda q, *rest, **options: forms("torch").mesa(q * float("nan"), *rest, **options))
    assert "o by inf" in module.run_pair(torch.float32, 16, DEVICE).failure

    def crash(*inputs, **options):
        raise RuntimeError("out of resources:\nshared memory")

    replace_triton(crash)
    assert module.run_pair(torch.float32, 16, DEVICE).failure == "RuntimeError: out of resources: shared memory"


COMPILE_WITHOUT_A_GPU = """
import importlib, threading, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from mesatron_kernels.triton_gradients import backward_gates
from mesatron_kernels.triton_states import combine

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

triton.runtime.driver.set_active(Hopper())
module = importlib.import_module("mesatron_kernels.selfcheck")
x, first_piece = torch.ones(64), torch.ones(2, dtype=torch.int32)
threads, left, run = set(), [], JITFunction.run

def launches(warmup):
    for lengths in (64, 7), (3, 1):  # as specialised: two kernels
        backward_gates.run(*[x] * 7, None, *lengths, 2, BLOCK_HEADS=16, L=16, grid=(1,), warmup=warmup)
    for pieces in x, first_piece:  # the first cannot be compiled
        combine.run(x, x, x[1:], x, pieces, 2, 64, BACKWARD=False, BLOCK=16, grid=(1,), warmup=warmup)

def kept(kernel):
    return len(kernel.device_caches[0][0])

triton.knobs.compilation.listener = lambda **_: threads.add(threading.get_ident())
module._compile_at_once(lambda: launches(warmup=False))
assert JITFunction.run is run
print(kept(backward_gates), kept(combine), threading.get_ident() in threads)
triton.knobs.runtime.jit_cache_hook = lambda **asked: left.append(asked["fn"].name) or True
launches(warmup=True)
print(left)
"""


def test_kernels_are_compiled_in_threads_for_the_launches_that_follow(tmp_path: Path) -> None:
    """Really compiled; the driver, which is never asked to launch, is made up. What cannot be compiled is left."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE_WITHOUT_A_GPU]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 1 False", "['combine']"]


def test_without_a_gpu_there_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU, and none is visible"):
        selfcheck()


def test_a_verdict_is_kept_for_later_processes(cache: Path, outcome: list) -> None:
    outcome.append(BAD)
    assert module.check_pair(torch.bfloat16, 128, GPU) == GOOD
    assert len(list(cache.iterdir())) == 1
    module._forget()  # as a new process
    assert module.check_pair(torch.bfloat16, 128, GPU) == GOOD
    assert module.check_pair(torch.bfloat16, 64, GPU) == BAD
    assert module.check_pair(torch.float16, 128, GPU) == BAD


def test_a_check_that_could_not_be_run_is_run_again(cache: Path, outcome: list) -> None:
    outcome[0] = CRASHED
    assert module.check_pair(torch.bfloat16, 128, GPU) == CRASHED
    outcome[0] = GOOD
    assert module.check_pair(torch.bfloat16, 128, GPU) == CRASHED  # once in a process
    module._forget()
    assert module.check_pair(torch.bfloat16, 128, GPU) == GOOD


def test_another_gpu_version_or_source_is_checked_anew(
    cache: Path, outcome: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome.append(BAD)
    assert module.check_pair(torch.bfloat16, 128, GPU) == GOOD
    monkeypatch.setattr(module, "machine", lambda device: {"gpu": "made up", "source": "1"})
    module._forget()
    assert module.check_pair(torch.bfloat16, 128, GPU) == BAD


@pytest.mark.parametrize("content", ["", "{", "[]", '{"dtype": "bfloat16"}', "\udcff"])
def test_a_record_that_cannot_be_read_is_replaced(cache: Path, outcome: list, content: str) -> None:
    module.check_pair(torch.bfloat16, 128, GPU)
    (record,) = cache.iterdir()
    record.write_text(content, errors="surrogateescape")
    module._forget()
    assert module.refusal(torch.bfloat16, 128, GPU) is None
    assert module.check_pair(torch.bfloat16, 128, GPU) == GOOD
    assert json.loads(record.read_text())["errors"] == {"o": 1e-3}


def test_nothing_depends_on_a_cache_that_can_be_written(cache: Path, outcome: list) -> None:
    cache.write_text("a file where the folder should be")
    assert module.check_pair(torch.bfloat16, 128, GPU) == GOOD
    assert cache.read_text().startswith("a file")


def test_nothing_depends_on_a_home(cache: Path, outcome: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user that it does not know."""
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert module.check_pair(torch.bfloat16, 128, GPU) == GOOD


def test_processes_that_write_at_once_leave_one_whole_record(cache: Path) -> None:
    path = cache / "record.json"
    module._write(path, GOOD)
    writers = [
        threading.Thread(target=lambda c=check: [module._write(path, c) for _ in range(100)])
        for check in [GOOD, BAD] * 2
    ]
    for writer in writers:
        writer.start()
    seen = [module._read(path) for _ in range(300)]
    for writer in writers:
        writer.join()
    assert all(check in (GOOD, BAD) for check in seen)
    assert list(cache.iterdir()) == [path]


def test_auto_is_triton_where_it_passes_and_torch_with_a_reason_elsewhere(cache: Path, outcome: list) -> None:
    assert resolve("auto", GPU, torch.bfloat16, 128) == ("triton", "its self-check passed")
    outcome[0] = BAD
    choice = resolve("auto", GPU, torch.float32, 128)
    assert choice.implementation == "torch"
    assert "dk by 5.0e-01" in choice.reason
    for size in (24, 144):
        choice = resolve("auto", GPU, torch.bfloat16, size)
        assert choice.implementation == "torch"
        assert choice.reason.endswith(f"multiples of 16 up to 128, not {size}")
    assert resolve("auto", GPU, torch.float64, 64) == ("torch", "triton has no torch.float64")
    assert resolve("auto", "cpu", torch.bfloat16, 128) == ("torch", "no GPU")


def test_triton_by_name_is_refused_once_it_is_known_to_fail(cache: Path, outcome: list) -> None:
    outcome[0] = BAD
    assert resolve("triton", GPU, torch.bfloat16, 128).implementation == "triton"  # nothing is known yet
    module.check_pair(torch.bfloat16, 128, GPU)
    with pytest.raises(ValueError, match=r"bfloat16 and head size 128 .*dk by 5.0e-01.*; choose torch"):
        resolve("triton", GPU, torch.bfloat16, 128)
    assert resolve("triton", GPU, torch.bfloat16, 64).implementation == "triton"


def test_resolve_is_a_constant_to_the_compiler(cache: Path) -> None:
    """Files and clocks behind it must not end a compiled graph."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * len(resolve("auto", x.device, x.dtype, x.shape[-1]).implementation)

    x = torch.ones(2, 16)
    assert torch.equal(torch.compile(scaled, fullgraph=True, backend="eager")(x), 5 * x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_shipped_pair_passes_on_this_gpu() -> None:
    found = selfcheck(force=True)
    assert len(found.pairs) == 6
    assert found.passed, [pair.failure for pair in found.pairs]
    assert selfcheck() == found
