"""Training a tokenizer: equal input against equal model bytes, samples by weight against the shares asked for, lines
against the text they were cut from, memory against what is free."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mesatron_data.errors import DataError
from mesatron_data.tokenizer import Tokenizer
from mesatron_data.tokenizer_training import (
    MEMORY_AT_REST,
    MEMORY_PER_SAMPLE_BYTE,
    free_memory,
    lines_of,
    processes_with_memory,
    train_tokenizer,
)


def test_training_is_a_function_of_input_and_seed(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_path)
    info = train_tokenizer(str(records), tmp_path / "all", 320)
    assert info.sha256 == tokenizer.sha256
    assert json.loads((tmp_path / "all/training.json").read_text())["sha256"] == info.sha256
    assert info.vocabulary_size == tokenizer.vocabulary_size == 320
    sampled = [
        train_tokenizer(str(records), tmp_path / str(n), 290, seed=seed, max_sample_bytes=9000)
        for n, seed in enumerate([5, 5, 6])
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0].sha256 != sampled[2].sha256
    for info in sampled:
        assert 0 < info.sample_bytes <= 9000
        assert info.documents == 323 > info.sample_documents


def test_more_pieces_than_the_text_can_fill(records: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"Cannot train a tokenizer of 30000 pieces on .*train: Vocabulary size too high"
    ):
        train_tokenizer(str(records), tmp_path, 30_000)
    with pytest.raises(DataError, match="Cannot train a tokenizer of 100 pieces"):
        train_tokenizer(str(records), tmp_path, 100)
    assert list(tmp_path.iterdir()) == []


def test_a_sample_by_weight(records: Path, tmp_path: Path) -> None:
    """Of the sources asked for, their shares to within a document; one that has less text gives what it has."""
    weights = {"RedPajamaBook": 3.0, "RedPajamaArXiv": 1.0}
    info = train_tokenizer(str(records), tmp_path / "some", 290, max_sample_bytes=8000, weights=weights)
    shares = {name: source.sample_bytes / 8000 for name, source in info.sources.items()}
    assert shares["RedPajamaGithub"] == 0
    assert 0.70 < shares["RedPajamaBook"] <= 0.75
    assert 0.20 < shares["RedPajamaArXiv"] <= 0.25
    again = train_tokenizer(str(records), tmp_path / "again", 290, max_sample_bytes=8000, weights=weights)
    assert again == info
    whole = train_tokenizer(str(records), tmp_path / "all", 290, max_sample_bytes=40_000, weights=weights)
    assert whole.sources["RedPajamaBook"].sample_bytes == whole.sources["RedPajamaBook"].bytes < 30_000
    assert whole.sources["RedPajamaArXiv"].sample_bytes <= 10_000
    assert len({whole.request, info.request}) == 2
    with pytest.raises(DataError, match=r"names the source Poems, but .* has only RedPajamaArXiv, RedPajamaBook, "):
        train_tokenizer(str(records), tmp_path / "none", 290, weights={"Poems": 1.0})
    with pytest.raises(DataError, match="asks for nothing: give at least one source a weight above 0"):
        train_tokenizer(str(records), tmp_path / "none", 290, weights={"RedPajamaBook": 0.0})


def test_lines_are_the_text_and_are_cut_where_nothing_belongs_together() -> None:
    family = "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3fd"
    accents = "e\u0301\u0327"
    for text in ("word " * 1000, "x" * 5000, family * 700, accents * 900, "a\n\nb" + "\u0301" * 3000, "日本語" * 2000):
        lines = list(lines_of(text))
        assert "".join(lines) == text.replace("\n", "")
        assert max(len(line.encode()) for line in lines) <= 4192
    assert all(line.startswith("\U0001f469") for line in lines_of(family * 700))
    assert all(line.startswith("e") for line in lines_of(accents * 900))
    assert all(line.endswith(("word", "word ")) for line in lines_of("word " * 1000))


def test_memory_is_guarded_before_anything_is_read(tmp_path: Path) -> None:
    assert 0 < free_memory() < 1 << 50
    needed = MEMORY_AT_REST + 1000 * MEMORY_PER_SAMPLE_BYTE
    assert [processes_with_memory(1000, free) for free in (needed, 3 * needed - 1)] == [1, 2]
    with pytest.raises(DataError, match=r"may take 1.4 GB .* 0.8 GB are free: set tokenizer.sample_bytes to 50000000 "):
        processes_with_memory(100_000_000, MEMORY_AT_REST + 50_000_000 * MEMORY_PER_SAMPLE_BYTE)
    with pytest.raises(DataError, match="may take"):
        train_tokenizer(str(tmp_path / "nowhere"), tmp_path, 300, max_sample_bytes=1 << 60)


TRAIN = """
import re, sys
from pathlib import Path
from mesatron_data.tokenizer_training import train_tokenizer
info = train_tokenizer(sys.argv[1], sys.argv[2], 500, max_sample_bytes=int(sys.argv[3]))
# The kernel's other figure, ru_maxrss, begins at the size of the process that started this one.
print(info.sample_bytes, int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024)
"""


def test_peak_memory_is_within_what_is_reckoned_with(tmp_path: Path) -> None:
    """Of text whose words are as frequent as in a language; text that repeats no word takes far more."""
    size = 12_000_000
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("etaoinshrdlu"), draw.integers(2, 11))) for _ in range(100_000)]
    folder = tmp_path / "in/train"
    folder.mkdir(parents=True)
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(size // 20_000):
            chosen = np.minimum(draw.zipf(1.2, 4000), len(words)) - 1
            file.write(json.dumps({"text": " ".join(words[number] for number in chosen)}) + "\n")
    arguments = [sys.executable, "-c", TRAIN, str(tmp_path / "in"), str(tmp_path / "out"), str(size)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    sample, peak = map(int, done.stdout.split())
    assert sample > 0.7 * size
    assert peak < MEMORY_AT_REST + MEMORY_PER_SAMPLE_BYTE * sample
