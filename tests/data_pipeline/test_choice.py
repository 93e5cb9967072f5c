"""Packings, lengths and cleaning through the whole of preparation, against documents chosen and packed by hand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from mesatron_data.batch import IGNORED_TARGET, collate
from mesatron_data.choice import Cleaning
from mesatron_data.duplicates import find_duplicates
from mesatron_data.errors import DataError
from mesatron_data.manifest import load_manifest
from mesatron_data.mds import read_samples
from mesatron_data.pack import padding
from mesatron_data.plan import Options
from mesatron_data.shards import prepare, tokenize_share
from mesatron_data.tokenizer import Tokenizer
from mesatron_data.verify import VERIFIED_FILE, verify

BOS = 1


def packed(folder: Path) -> dict[str, bytes]:
    """What was prepared there; without the note of times."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != VERIFIED_FILE]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def token_folder(records: Path, tokenizer_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of the records, made for a context length of 16."""
    folder = tmp_path_factory.mktemp("tokens")
    tokenize_share(str(records), folder / "out", tokenizer_path, 16, 0, 1, options=Options(token_folder=folder))
    return folder


@pytest.mark.parametrize("length", [8, 16, 61, 500])
def test_another_length_takes_no_tokenizing(
    records: Path, tokenizer_path: Path, token_folder: Path, tmp_path: Path, length: int
) -> None:
    before = {path: path.stat().st_mtime_ns for path in token_folder.rglob("*.tokens")}
    assert len(before) == 4
    paths = (str(records), tmp_path / "out", tokenizer_path, length)
    prepare(*paths, shard_bytes=3000, merge_only=True, options=Options(token_folder=token_folder))
    assert {path: path.stat().st_mtime_ns for path in token_folder.rglob("*.tokens")} == before
    prepare(str(records), tmp_path / "direct", tokenizer_path, length, shard_bytes=3000)
    assert packed(tmp_path / "out") == packed(tmp_path / "direct")


def test_token_files_of_other_records_of_the_same_names_stay(
    records: Path, tokenizer_path: Path, token_folder: Path, tmp_path: Path
) -> None:
    tokens = shutil.copytree(token_folder, tmp_path / "tokens")
    before = {path: path.read_bytes() for path in tokens.rglob("*") if path.is_file()}
    other = shutil.copytree(records, tmp_path / "in")
    (other / "train/b.jsonl").write_text(json.dumps({"text": "of and to in a is that"}))
    options = Options(token_folder=tokens)
    manifest = prepare(str(other), tmp_path / "out", tokenizer_path, 16, options=options).manifest
    assert manifest.splits["train"].documents == 100 + 1 + 73
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("length", [13, 40, 200])
def test_best_fit_cuts_only_what_does_not_fit(
    records: Path, tokenizer_path: Path, texts: dict[str, list[str]], token_folder: Path, tmp_path: Path, length: int
) -> None:
    """Every token of every document is there once, each piece begun by one BOS and none split that fits."""
    options = Options(packing="best_fit", token_folder=token_folder)
    paths = (str(records), tmp_path / "out", tokenizer_path, length)
    manifest = prepare(*paths, shard_bytes=3000, options=options).manifest
    tokenizer = Tokenizer.load(tokenizer_path)
    samples = list(read_samples(tmp_path / "out", "train"))
    counts = manifest.splits["train"]
    assert counts.samples == len(samples)
    expected, cuts = [], 0
    for number, text in enumerate(texts["train"]):
        ids = tokenizer.encode(text)
        pieces = [ids[begin : begin + length] for begin in range(0, len(ids), length)]
        cuts += len(pieces) - 1
        expected += [(["RedPajamaBook", "RedPajamaArXiv", "RedPajamaGithub"][number % 3], piece) for piece in pieces]
    found, empty = [], 0
    for sample in samples:
        assert len(sample.tokens) == length + 1
        unused = padding(sample, BOS)
        empty += unused
        bounds = [*sample.document_starts.tolist(), length + 1]
        for start, end, source in zip(bounds[:-1], bounds[1:], sample.sources.tolist(), strict=True):
            if start < length + 1 - unused:
                assert sample.tokens[start] == BOS
                found.append((manifest.sources[source], sample.tokens[start + 1 : end].tolist()))
    assert sorted(found) == sorted(expected)
    assert (counts.cuts, counts.padding_tokens) == (cuts, empty)
    assert len(samples) * (length + 1) == sum(len(piece) + 1 for _, piece in expected) + empty
    if length == 200:
        assert empty / len(samples) / length < 0.15
    verify(tmp_path / "out")
    batch = collate(samples[:4], [0, 1, 2, 3], BOS)
    for row, sample in enumerate(samples[:4]):
        unused = padding(sample, BOS)
        assert (batch.targets[row, length - unused :] == IGNORED_TARGET).all()
        assert int((batch.targets[row] != IGNORED_TARGET).sum()) == int((sample.tokens != BOS).sum())
    prepare(str(records), tmp_path / "again", tokenizer_path, length, shard_bytes=3000, workers=2, options=options)
    assert packed(tmp_path / "again") == packed(tmp_path / "out")


def test_cuts_of_concatenated_documents(
    records: Path, tokenizer_path: Path, texts: dict[str, list[str]], token_folder: Path, tmp_path: Path
) -> None:
    options = Options(token_folder=token_folder)
    counts = prepare(str(records), tmp_path / "out", tokenizer_path, 16, options=options).manifest.splits["train"]
    tokenizer = Tokenizer.load(tokenizer_path)
    begins = {0}
    for text in texts["train"]:
        begins.add(max(begins) + len(tokenizer.encode(text)) + 1)
    assert counts.cuts == sum(sample * 16 not in begins for sample in range(counts.samples))
    assert counts.padding_tokens == 0


def test_an_unknown_packing_is_refused(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no packing 'tight': choose one of concatenate, best_fit"):
        prepare(str(records), tmp_path / "out", tokenizer_path, 16, options=Options(packing="tight"))


@pytest.fixture(scope="module")
def repeated(records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records with some of their texts again: in the same file, in a later one and in validation."""
    folder = shutil.copytree(records, tmp_path_factory.mktemp("repeated") / "in")
    texts = [json.loads(line)["text"] for line in (folder / "train/b.jsonl").read_text().splitlines()]
    for name, some in (
        ("train/b.jsonl", texts[:2] * 2),
        ("train/z.jsonl", texts[10:13]),
        ("validation/z.jsonl", texts[:1]),
    ):
        with (folder / name).open("a") as file:
            file.write("".join(json.dumps({"text": text}) + "\n" for text in some))
    return folder


def test_repeated_texts_are_counted_and_removed_if_asked(repeated: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    options = Options(token_folder=tmp_path)
    paths = (str(repeated), tmp_path / "kept", tokenizer_path, 16)
    kept = prepare(*paths, options=options).manifest.splits
    assert {name: split.duplicates for name, split in kept.items()} == {"train": 7, "validation": 1}
    assert {name: split.documents for name, split in kept.items()} == {"train": 330, "validation": 41}
    assert kept["train"].removed == {}
    options = Options(token_folder=tmp_path, cleaning=Cleaning(remove_duplicates=True))
    removed = prepare(str(repeated), tmp_path / "removed", tokenizer_path, 16, workers=2, options=options).manifest
    assert {name: split.removed for name, split in removed.splits.items()} == {
        "train": {"duplicate": 7}, "validation": {"duplicate": 1}
    }  # fmt: skip
    stream = [token for sample in read_samples(tmp_path / "removed", "train") for token in sample.tokens[1:].tolist()]
    plain = Path(tmp_path / "plain")
    clean = shutil.copytree(repeated, tmp_path / "in")
    for name in ("train/z.jsonl", "validation/z.jsonl"):
        (clean / name).unlink()
    lines = (clean / "train/b.jsonl").read_text().splitlines(keepends=True)
    (clean / "train/b.jsonl").write_text("".join(lines[:-4]))
    prepare(str(clean), plain, tokenizer_path, 16)
    assert stream == [token for sample in read_samples(plain, "train") for token in sample.tokens[1:].tolist()]


def test_documents_out_of_bounds_are_left_out(
    records: Path, texts: dict[str, list[str]], tokenizer_path: Path, token_folder: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(tokenizer_path)
    lengths = np.array([len(tokenizer.encode(text)) + 1 for text in texts["train"]])
    low, high = int(np.quantile(lengths, 0.2)), int(np.quantile(lengths, 0.9))
    options = Options(token_folder=token_folder, cleaning=Cleaning(low, high))
    paths = (str(records), tmp_path / "out", tokenizer_path, 16)
    counts = prepare(*paths, shard_bytes=3000, options=options).manifest.splits["train"]
    chosen = [text for text, length in zip(texts["train"], lengths, strict=True) if low <= length <= high]
    assert counts.removed == {"too_long": int((lengths > high).sum()), "too_short": int((lengths < low).sum())}
    assert counts.documents == len(chosen) == sum(counts.document_lengths.values())
    assert sum(source.bytes for source in counts.sources.values()) == sum(len(text.encode()) for text in chosen)
    samples = list(read_samples(tmp_path / "out", "train"))
    stream = samples[0].tokens.tolist() + [token for sample in samples[1:] for token in sample.tokens[1:].tolist()]
    expected = [token for text in chosen for token in [BOS, *tokenizer.encode(text)]]
    assert stream == expected[: len(stream)]
    assert len(expected) - len(stream) == counts.dropped_tail_tokens
    assert load_manifest(str(tmp_path / "out")).splits["train"] == counts


def test_duplicates_against_a_set(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    values = draw.integers(0, 1 << 63, 4000, dtype=np.uint64) << np.uint64(1)
    hashes = draw.choice(values, 10_000)
    parts = [hashes[begin : begin + 777] for begin in range(0, len(hashes), 777)]
    found = np.frombuffer(find_duplicates(iter(parts), len(hashes), tmp_path).read_bytes(), np.uint8)
    seen: set[int] = set()
    for value, repeated in zip(hashes.tolist(), found.tolist(), strict=True):
        assert repeated == (value in seen)
        seen.add(value)
    assert [path.name for path in tmp_path.iterdir()] == ["repeated"]
    assert find_duplicates(iter([]), 0, tmp_path).read_bytes() == b""


def test_space_for_duplicates_is_taken_before_they_are_found(tmp_path: Path) -> None:
    """Else a disk that fills up ends the process without a word."""
    documents = 1_000_000
    result = find_duplicates(iter([np.arange(documents, dtype=np.uint64)]), documents, tmp_path).stat()
    assert result.st_size == documents <= result.st_blocks * 512
