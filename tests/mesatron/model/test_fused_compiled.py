"""The model's Triton kernels compile for sm_80 and sm_90 without a GPU, spill nothing, and load activations 16 bytes at
a time: their speed is that of memory."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_kernels_spill_nothing_and_load_widely() -> None:
    """In a process of its own, for tests may have chosen Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_fused.py")), "80", "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == 50
    for report in reports:
        print(report)
        if report["kernel"].startswith("products"):  # whose speed is that of tensor cores
            most = 0 if report["capability"] == 90 else 160
            assert report["stack_bytes"] <= most or report["channels"] > 128, report
            assert report["shared_bytes"] <= 99 * 1024, report
            continue
        assert report["stack_bytes"] == 0, report
        assert report["shared_bytes"] <= 16 * 1024, report
        if report["kernel"].startswith("decays"):
            continue  # one number a token and head
        # The rest are a channel's weights, a token's position or its target.
        assert report["wide_loads"] >= 2, report
        assert report["loads"] - report["wide_loads"] <= 12, report
