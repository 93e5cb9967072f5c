"""`mesatron doctor kernels`: the real command where no GPU is to be seen, its words and its fault for made-up
verdicts."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mesatron_kernels.selfcheck import PairCheck

from mesatron.doctor import kernels
from mesatron.errors import ConfigError

selfcheck = importlib.import_module("mesatron_kernels.selfcheck")


def test_without_a_gpu_nothing_is_wrong() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mesatron", "doctor", "kernels"], capture_output=True, text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stdout == "There is no GPU here: the Mesa operator will run with the torch implementation.\n"


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pairs to find wrong on a made-up GPU."""
    pairs: set[tuple[torch.dtype, int]] = set()

    def run_pair(dtype: torch.dtype, head_size: int, device: torch.device) -> PairCheck:
        failure = "off from float64" if (dtype, head_size) in pairs else None
        return PairCheck(selfcheck.dtype_name(dtype), head_size, {"o": 1.2e-3, "dk": 3.4e-3}, failure, 1.5)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(selfcheck, "machine", lambda device: {"gpu": "Made Up 100", "source": "0"})
    monkeypatch.setattr(selfcheck, "run_pair", run_pair)
    monkeypatch.setattr(selfcheck, "_check_in_parallel", lambda pairs, device: None)
    selfcheck._forget()
    yield pairs
    selfcheck._forget()


def test_all_is_well(wrong: set, capsys: pytest.CaptureFixture[str]) -> None:
    kernels()
    out = capsys.readouterr().out
    assert "gpu Made Up 100" in out
    rows = [line.split() for line in out.splitlines() if "self-check" in line]
    assert len(rows) == 6
    assert rows[0] == ["bfloat16", "64", "3.4e-03", "dk", "1.5", "triton", "its", "self-check", "passed"]


def test_a_failure_is_shown_kept_and_forgotten_on_request(wrong: set, capsys: pytest.CaptureFixture[str]) -> None:
    wrong.add((torch.float16, 128))
    fault = "wrong on this GPU for float16 with heads of 128, which will run with the slow torch"
    with pytest.raises(ConfigError, match=fault) as raised:
        kernels()
    assert raised.value.exit_code == 2
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "off from float64" in line]
    assert row.split()[:6] == ["float16", "128", "3.4e-03", "dk", "1.5", "torch"]
    wrong.clear()
    with pytest.raises(ConfigError, match=fault):
        kernels()
    kernels(again=True)
