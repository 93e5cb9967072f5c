"""Every kernel that trains compiles for sm_80 and sm_90 without a GPU, against what they may spill and take of shared
memory; `launch` against its own table, and the table against what was compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mesatron_kernels.launch import SHARED_BYTES, chunk_length

KIB = 1024
DEVICE_BYTES = {80: 163 * KIB, 90: 227 * KIB}
CONSUMER_BYTES = 99 * KIB
# bf16, heads of 128, sm_90: bytes of stack that may be spilt. Lower a figure with the spill; none may rise.
ALLOWED_SPILLS = {
    "solve_forward": 712, "solve_backward": 800, "backward_states": 384, "backward_inputs": 528,
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    """What compile_kernels.py prints; in a process of its own, for tests may have chosen Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    command = [sys.executable, str(script), *map(str, DEVICE_BYTES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_fit_the_gpus_they_are_compiled_for(reports: list[dict]) -> None:
    assert {report["capability"] for report in reports} == set(DEVICE_BYTES)
    for report in reports:
        assert report["shared_bytes"] <= DEVICE_BYTES[report["capability"]], report


def test_training_kernels_spill_no_more_than_is_known(reports: list[dict]) -> None:
    def trains(report: dict) -> bool:
        return (report["precision"], report["head_size"], report["chunk_length"], report["capability"]) == (
            "bf16", 128, 64, 90,
        )  # fmt: skip

    spilt = {report["kernel"]: report["stack_bytes"] for report in reports if trains(report)}
    assert spilt.keys() > ALLOWED_SPILLS.keys()
    assert {name: bytes for name, bytes in spilt.items() if bytes > ALLOWED_SPILLS.get(name, 0)} == {}


def test_tabulated_needs_are_those_of_a_fresh_compile(reports: list[dict]) -> None:
    needs: dict[tuple[int, int, int], int] = {}
    for report in reports:
        key = ({"bf16": 16, "tf32x3": 32}[report["precision"]], report["head_size"], report["chunk_length"])
        needs[key] = max(report["shared_bytes"], needs.get(key, 0))
    assert needs == {(*key, length): need for key, (length, need) in SHARED_BYTES.items()}


def test_only_16_bits_compile_code_for_low_terms(reports: list[dict]) -> None:
    solves = {(r["precision"], r["solves"]) for r in reports if r["kernel"] == "solve_backward"}
    assert solves == {("bf16", 2), ("tf32x3", 1)}


@pytest.mark.parametrize("available", [CONSUMER_BYTES, *DEVICE_BYTES.values()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [16, 64, 80, 128])
def test_a_chunk_length_fits_or_the_reason_is_said(available: int, dtype: torch.dtype, head_size: int) -> None:
    if dtype == torch.float32 and head_size > 64 and available == CONSUMER_BYTES:
        with pytest.raises(ValueError, match=r"163,840 bytes .* but this GPU has 101,376; choose torch"):
            chunk_length(dtype, head_size, available)
        return
    assert chunk_length(dtype, head_size, available) == (16 if dtype == torch.float32 else 64)
