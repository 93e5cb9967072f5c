"""What a run ran on, for environment.json."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from mesatron.parallel.distributed import World
from mesatron.versions import installed_version

PACKAGES = ("mesatron", "torch", "triton", "deepspeed", "mosaicml-streaming", "sentencepiece", "numpy", "safetensors")


def describe_environment(world: World) -> dict[str, Any]:
    """Versions, hardware, git commit, command line and topology as plain JSON values."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "host": platform.node(),
        "platform": platform.platform(),
        "gpus": gpus,
        "git_commit": _git_commit(),
        "command": shlex.join(sys.argv),
        "world_size": world.size,
        "device": world.device.type,
    }


def _git_commit() -> str | None:
    """The commit of the source tree this package runs from, with `+changes` for a modified one; None outside git."""
    source = Path(__file__).parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+changes"],
            cwd=source, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()
