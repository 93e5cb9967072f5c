"""Every kernel compiles for sm_80 and sm_90 without a GPU and fits their shared memory, at the sizes that train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_and_fit(capability):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    command = [sys.executable, str(script), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) >= 8
    for report in reports:
        print(report)
        assert report["shared_bytes"] <= SHARED_BYTES[capability], report
