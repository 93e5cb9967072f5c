"""What several parts share: a small prepared data set of real text, configs for it, and one run trained on it."""

import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
import zstandard
from mesatron_data.shards import prepare
from mesatron_data.tokenizer_training import train_tokenizer

if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # for tests/kernels; Triton reads it when anything first imports it

# A shell's background jobs ignore SIGINT, and so would what tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the workers of a test run share the cores already
# A forked child has none of the threads that torch's pool had here, and would wait for them.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

SLURM = "slurm"
CONTEXT_LENGTH = 64
VOCABULARY_SIZE = 512
SAMPLE_BYTES = 100_000
SAMPLE = Path(__file__).parents[1] / "data_pipeline/sample/validation/part-00000.jsonl.zst"


@pytest.hookimpl(tryfirst=True)  # xdist's own reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (`-n`), one has all tests of a file, which share fixtures, or of the Slurm cluster.

    The latter come first: as the longest group they would keep one worker busy when the others have ended.
    """
    for item in items:
        group = SLURM if item.path.parent.name == SLURM else str(item.path.relative_to(item.config.rootpath))
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.path.parent.name != SLURM)


def pytest_sessionfinish() -> None:
    """Workers end without what Python does at an exit, and would leave the folder of a fork server's socket."""
    multiprocessing.util._run_finalizers()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary folder whose path leaves room for a socket's name, as pytest's own do not always."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with raw/ (the sample's held-out text; every fourth document is validation too), tokenizer/ and shards/.

    Shards of context length 64 with a vocabulary of 512. Tests that change files copy them first.
    """
    folder = tmp_path_factory.mktemp("tiny")
    with zstandard.open(SAMPLE, "rb") as file:
        lines = file.read().splitlines(keepends=True)
    for split, documents in {"train": lines, "validation": lines[::4]}.items():
        (folder / "raw" / split).mkdir(parents=True)
        (folder / "raw" / split / "documents.jsonl").write_bytes(b"".join(documents))
    train_tokenizer(str(folder / "raw"), folder / "tokenizer", VOCABULARY_SIZE, max_sample_bytes=SAMPLE_BYTES)
    prepare(str(folder / "raw"), folder / "shards", folder / "tokenizer", CONTEXT_LENGTH)
    return folder


@pytest.fixture(scope="session")
def tiny_config(tiny_data: Path) -> Callable[..., Path]:
    """`tiny_config(folder, **{"train.steps": 5})` writes folder/config.yaml, a run on `tiny_data`, and returns it.

    The model has 2 layers and an odd head size; the run takes 6 steps in fp32 and its folder is folder/runs/tiny.
    """

    def write(folder: Path, **overrides: Any) -> Path:
        values: dict[str, Any] = {
            "name": "tiny",
            "runs_folder": str(folder / "runs"),
            "model": {"vocabulary_size": VOCABULARY_SIZE, "width": 36, "layers": 2, "heads": 2, "head_dim": 18},
            "tokenizer": {"path": str(tiny_data / "tokenizer"), "sample_bytes": SAMPLE_BYTES},
            "data": {
                "input_folder": str(tiny_data / "raw"), "folder": str(tiny_data / "shards"),
                "context_length": CONTEXT_LENGTH, "workers": 0,
            },
            "train": {
                "steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "precision": "fp32", "peak_lr": 3e-3,
                "warmup_steps": 2,
            },
            "checkpoint": {"every_steps": 3},
            "monitor": {"histogram_every_steps": 3},
            "evaluate": {"every_steps": 3, "max_sequences": 16},
        }  # fmt: skip
        for key, value in overrides.items():
            *parents, last = key.split(".")
            section = values
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return path

    return write


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., Path]) -> Path:
    """The folder of the run of `tiny_config`, trained to its end by the real command. Tests that change it copy it."""
    folder = tmp_path_factory.mktemp("trained")
    config = tiny_config(folder, **{"evaluate.micro_batch_size": 64})
    command = [sys.executable, "-m", "mesatron", "train", str(config)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return folder / "runs/tiny"
