"""Shared inputs of the data pipeline tests: records written on the spot, a small tokenizer and a prepared folder."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from mesatron_data.shards import prepare
from mesatron_data.tokenizer import MODEL_FILE
from mesatron_data.tokenizer_training import train_tokenizer

SOURCES = ("RedPajamaBook", "RedPajamaArXiv", "RedPajamaGithub")
CONTEXT_LENGTH = 16
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "at",
]


def record(text: object, source: str | None = "RedPajamaBook") -> str:
    """One line of a record file, without the line feed."""
    return json.dumps({"text": text, "meta": {"redpajama_set_name": source}})


def write_records(path: Path, lines: list[str | bytes]) -> None:
    """Write lines to a .jsonl or .jsonl.zst file."""
    data = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.ZstdCompressor().compress(data) if path.suffix == ".zst" else data)


def random_texts(count: int, seed: int) -> list[str]:
    """Texts of 1 to 60 words; some with tabs, line feeds and runs of spaces."""
    draw = np.random.default_rng(seed)
    separators = [" ", " ", " ", "  ", "\n", "\t"]
    return [
        "".join(draw.choice(WORDS) + draw.choice(separators) for _ in range(draw.integers(1, 60))) + f"end {number}"
        for number in range(count)
    ]


@pytest.fixture(scope="session")
def texts() -> dict[str, list[str]]:
    """The documents behind `prepared`, in their order."""
    return {"train": random_texts(323, seed=1), "validation": random_texts(40, seed=2)}


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, list[str]]) -> Path:
    """An input folder: train in three files, validation in one, sources in turn."""
    folder = tmp_path_factory.mktemp("records")
    lines = [record(text, SOURCES[number % 3]) for number, text in enumerate(texts["train"])]
    write_records(folder / "train/a.jsonl.zst", lines[:100])
    write_records(folder / "train/b.jsonl", lines[100:250])
    write_records(folder / "train/deep/c.jsonl.zst", lines[250:])
    write_records(folder / "validation/a.jsonl.zst", [record(text, SOURCES[1]) for text in texts["validation"]])
    return folder


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory, records: Path) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(str(records), folder, vocabulary_size=320)
    return folder / MODEL_FILE


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, records: Path, tokenizer_path: Path) -> Path:
    """A prepared folder of several small shards. Tests that change files copy it first."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(str(records), folder, tokenizer_path, CONTEXT_LENGTH, shard_bytes=3000)
    return folder


@pytest.fixture
def prepare_texts(tmp_path: Path, tokenizer_path: Path) -> Callable[..., Path]:
    """Prepare the given training texts (and one validation text) with the shared tokenizer."""

    def make(train: list[str], max_skipped_fraction: float = 0.01) -> Path:
        write_records(tmp_path / "in/train/a.jsonl", [record(text) for text in train])
        write_records(tmp_path / "in/validation/a.jsonl", [record(" ".join(WORDS))])
        prepare(str(tmp_path / "in"), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH, max_skipped_fraction)
        return tmp_path / "out"

    return make


@pytest.fixture
def locks_of_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exclusive locks are refused, as NFS does it, where the file is not open for writing."""
    flock = fcntl.flock

    def lock(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
