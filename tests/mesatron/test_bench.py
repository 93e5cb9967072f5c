"""`mesatron bench` as a person meets it: the table and the JSON file say the same, mistakes end in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mesatron_kernels.accuracy import KINDS

from mesatron.bench import Keys

SMALL = ("--heads", "2", "--head-size", "16", "--dtype", "fp32", "--torch", "--no-peers")


def mesatron(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "mesatron", *map(str, arguments)], capture_output=True, text=True, timeout=300,
        env=environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"},
    )  # fmt: skip


def test_bench_mesa_prints_what_it_writes(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--batch", "2", "--length", "70", "--documents", "3", "--inputs", "lowrank", "--gamma", "0.999")
    done = mesatron("bench", "mesa", *SMALL, *options, "--lambda", "0.25", "--json", file)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["setting"]["lam"] == 0.25
    assert figures["setting"]["documents"] == 3
    assert figures["machine"]["torch"] == torch.__version__
    row = figures["rows"][-1]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("torch")]
    cells = line.split()
    assert cells[1:3] == [f"{row['forward_ms']:.2f}", f"{row['total_ms']:.2f}"]
    assert [float(cell) for cell in cells[-7:]] == pytest.approx(list(row["errors"].values()), rel=0.05)
    assert max(row["errors"].values()) < 1e-3
    assert f"copy {figures['rates']['copy_gb_per_second']:,.0f} GB/s" in done.stdout


def test_bench_decode_prints_what_it_writes(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = mesatron("bench", "decode", *SMALL, "--batch", "1", "--batch", "3", "--json", file)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    rows = [row for row in figures["rows"] if row["name"] == "torch"]
    assert [row["batch"] for row in rows] == [1, 1, 1, 3, 3, 3]
    copy = figures["rates"]["copy_gb_per_second"]
    for row in rows:
        share = f"{1e5 * row['tb_per_second'] / copy:.0f}"
        assert [line for line in done.stdout.splitlines() if f"{row['milliseconds']:.3f}" in line and share in line]


def test_mistakes_end_in_one_line() -> None:
    done = mesatron("bench", "mesa", *SMALL, "--batch", "1", "--length", "5", "--documents", "6")
    assert done.returncode == 2
    assert done.stderr == "mesatron: --documents is 6, more than the 5 tokens; lower it.\n"
    done = mesatron("bench", "layouts", "configs/quickstart.yaml", "--processes", "2", "--layout", "TP3")
    assert done.returncode == 2
    assert done.stderr.startswith("mesatron: --layout 'TP3' is no layout here; known are DP2, ZeRO-1; DP2, ZeRO-2; ")


def test_names_of_keys_are_those_of_the_operators() -> None:
    assert {key.value for key in Keys} == set(KINDS)
