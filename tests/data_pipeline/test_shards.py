"""Preparing data: stored shards against the text they came from, equal input against equal bytes, and what failures
leave behind."""

import errno
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mesatron_data.errors import DataError, DiskFullError
from mesatron_data.files import writing
from mesatron_data.manifest import load_manifest
from mesatron_data.shards import Progress, prepare, read_samples
from mesatron_data.tokenizer import Tokenizer

CONTEXT_LENGTH = 16


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stream_of(folder: Path, split: str) -> list[int]:
    """The stored token stream: the first sample, then what each sample adds."""
    samples = list(read_samples(folder, split))
    return samples[0].tokens.tolist() + [token for sample in samples[1:] for token in sample.tokens[1:].tolist()]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_stored_shards_decode_to_the_documents(
    prepared: Path, tokenizer_path: Path, texts: dict[str, list[str]], split: str
) -> None:
    tokenizer = Tokenizer.load(tokenizer_path)
    manifest = load_manifest(str(prepared))
    stream = stream_of(prepared, split)
    counts = manifest.splits[split]
    assert len(stream) + counts.dropped_tail_tokens == counts.tokens
    assert counts.samples == sum(1 for _ in read_samples(prepared, split))
    assert counts.documents == len(texts[split])
    assert sum(counts.document_lengths.values()) == len(texts[split])
    assert sum(source.bytes for source in counts.sources.values()) == sum(len(text.encode()) for text in texts[split])
    assert stream[0] == manifest.bos_id
    begins = [place for place, token in enumerate(stream) if token == manifest.bos_id]
    documents = [tokenizer.decode(stream[begin + 1 : end]) for begin, end in itertools.pairwise([*begins, len(stream)])]
    assert documents[:-1] == texts[split][: len(documents) - 1]
    assert texts[split][len(documents) - 1].startswith(documents[-1].rstrip("\ufffd"))
    assert len(texts[split]) - len(documents) <= 1


def test_sources_follow_their_documents(prepared: Path, tokenizer_path: Path, texts: dict[str, list[str]]) -> None:
    tokenizer = Tokenizer.load(tokenizer_path)
    manifest = load_manifest(str(prepared))
    expected = [
        ("RedPajamaBook", "RedPajamaArXiv", "RedPajamaGithub")[number % 3]
        for number, text in enumerate(texts["train"])
        for _ in range(len(tokenizer.encode(text)) + 1)
    ]
    stored = []
    for sample in read_samples(prepared, "train"):
        of_token = np.repeat(sample.sources, np.diff(sample.document_starts, append=CONTEXT_LENGTH + 1)).tolist()
        stored += [manifest.sources[source] for source in of_token[1 if stored else 0 :]]
    assert stored == expected[: len(stored)]
    for name in manifest.sources:
        assert manifest.splits["train"].sources[name].tokens == expected.count(name)


def test_the_same_input_gives_the_same_bytes(
    prepared: Path, records: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    result = prepare(str(records), tmp_path / "again", tokenizer_path, CONTEXT_LENGTH, shard_bytes=6000)
    assert not result.reused
    assert files_of(tmp_path / "again") == {
        name: digest for name, digest in files_of(prepared).items() if not name.endswith(".mds")
    }


def test_a_second_call_returns_at_once_and_other_settings_are_refused(
    records: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    first = prepare(str(records), output, tokenizer_path, CONTEXT_LENGTH)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    second = prepare(str(records), output, tokenizer_path, CONTEXT_LENGTH)
    assert second.reused
    assert second.manifest == first.manifest
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    with pytest.raises(DataError, match="was prepared from other input or settings"):
        prepare(str(records), output, tokenizer_path, CONTEXT_LENGTH + 1)
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    replaced = prepare(str(records), output, tokenizer_path, CONTEXT_LENGTH + 1, overwrite=True)
    assert load_manifest(str(output)) == replaced.manifest
    assert replaced.manifest.context_length == CONTEXT_LENGTH + 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    next((output / "train").glob("*.zstd")).unlink()
    with pytest.raises(DataError, match=r"shard.00000.mds.zstd is missing"):
        prepare(str(records), output, tokenizer_path, CONTEXT_LENGTH + 1)


def test_a_folder_of_something_else_is_never_touched(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="exists and is not a prepared data folder"):
        prepare(str(records), tmp_path, tokenizer_path, CONTEXT_LENGTH, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_odd_documents_everywhere(prepare_texts: Callable[..., Path], tokenizer_path: Path) -> None:
    """Empty and blank documents first, in the middle and last are counted; single characters, NUL and 1 MB lines are
    kept."""
    kept = ["a", "nul\0nul", "x" * 1_000_000, "\u2581", "\n.", "the end " * 10]
    folder = prepare_texts(["", kept[0], " \n", *kept[1:3], "", *kept[3:], "\t"], 0.5)
    counts = load_manifest(str(folder)).splits["train"]
    assert counts.skipped == {"empty": 2, "whitespace_only": 2}
    assert counts.skipped_places == {
        "empty": ["train/a.jsonl:1", "train/a.jsonl:6"],
        "whitespace_only": ["train/a.jsonl:3", "train/a.jsonl:10"],
    }
    stream = stream_of(folder, "train")
    assert stream.count(1) == counts.documents == len(kept)
    begins = [place for place, token in enumerate(stream) if token == 1]
    tokenizer = Tokenizer.load(tokenizer_path)
    assert [tokenizer.decode(stream[begin + 1 : end]) for begin, end in itertools.pairwise(begins)] == kept[:-1]


def test_user_mistakes(records: Path, tokenizer_path: Path, tmp_path: Path, prepare_texts: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"train records give \d+ tokens, but one sample takes 17"):
        prepare_texts(["a"])
    with pytest.raises(DataError, match=r"2 of 3 records in train/ cannot be used"):
        prepare_texts(["", "the of and", ""])
    with pytest.raises(DataError, match="context_length is 0"):
        prepare(str(records), tmp_path / "out", tokenizer_path, 0)
    with pytest.raises(DataError, match="cannot hold samples"):
        prepare(str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH, shard_bytes=100)
    with pytest.raises(DataError, match="No folder"):
        prepare(str(tmp_path), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_progress_ends_at_the_manifest(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    manifest = prepare(str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH, progress=seen.append).manifest
    splits = manifest.splits.values()
    assert seen[-1] == Progress(4, 4, sum(split.documents for split in splits), sum(split.tokens for split in splits))
    assert [report.tokens for report in seen] == sorted(report.tokens for report in seen)


PREPARE = """
import sys, resource, signal
from mesatron_data.errors import DiskFullError
from mesatron_data.shards import prepare
mode, *arguments = sys.argv[1:]
if mode == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
def progress(report):
    if mode == "pause" and report.documents == 200:
        print("half way", flush=True)
        sys.stdin.read()
try:
    prepare(*arguments, 16, shard_bytes=6000, progress=progress)
except DiskFullError as error:
    print(error)
"""


def test_a_full_disk_is_one_line_and_leaves_nothing(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    arguments = ["limit", str(records), str(tmp_path / "out"), str(tokenizer_path)]
    done = subprocess.run([sys.executable, "-c", PREPARE, *arguments], capture_output=True, text=True, check=True)
    assert (
        done.stdout
        == f"No space left while writing {tmp_path}/out: free some space, or choose another output folder.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_no_space_is_told_from_other_faults(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError), writing(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(DataError, match="Permission denied") as caught, writing(tmp_path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert not isinstance(caught.value, DiskFullError)


def test_a_killed_run_leaves_nothing_that_looks_complete(
    records: Path, tokenizer_path: Path, prepared: Path, tmp_path: Path
) -> None:
    arguments = ["pause", str(records), str(tmp_path / "out"), str(tokenizer_path)]
    with subprocess.Popen(
        [sys.executable, "-c", PREPARE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "half way\n"
        with pytest.raises(DataError, match="Another run is writing"):
            prepare(str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH, shard_bytes=6000)
        run.kill()
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.partial/train").is_dir()
    result = prepare(str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH, shard_bytes=6000)
    assert result.manifest == load_manifest(str(prepared))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_damaged_manifest_is_named(prepared: Path, tmp_path: Path) -> None:
    manifest = json.loads((prepared / "manifest.json").read_text())
    for content, message in [
        ("{", "manifest.json is damaged"),
        ("[]", "no JSON object"),
        (json.dumps(manifest | {"format_version": 99}), "has format 99"),
        (json.dumps(manifest | {"colour": "red"}), "manifest.json is damaged"),
        (json.dumps({key: value for key, value in manifest.items() if key != "splits"}), "manifest.json is damaged"),
    ]:
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(DataError, match=message):
            load_manifest(str(tmp_path))


def test_reading_and_preparing_need_no_torch_to_be_imported() -> None:
    """The command line imports these modules to answer --help."""
    code = """if True:
        import sys
        from mesatron_data import inspect, manifest, pack, records, shards, tokenizer, verify
        print({"torch", "streaming"} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
