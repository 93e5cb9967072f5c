"""Preparing data: stored shards against the text they came from, equal input against equal bytes, and what failures
leave behind."""

import errno
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from mesatron_data.errors import DataError, DiskFullError
from mesatron_data.files import writing
from mesatron_data.manifest import load_manifest
from mesatron_data.mds import read_samples
from mesatron_data.progress import Progress
from mesatron_data.shards import prepare, tokenize_share
from mesatron_data.tokenizer import Tokenizer
from mesatron_data.tokenizer_training import train_tokenizer
from mesatron_data.verify import VERIFIED_FILE

CONTEXT_LENGTH = 16
SHARD_BYTES = 3000


def files_of(folder: Path) -> dict[str, str]:
    """What was prepared there, by hash; without what streams have unpacked and the note of times."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and folder / "unpacked" not in path.parents and path.name != VERIFIED_FILE
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


@pytest.mark.parametrize("way", ["alone", "three workers", "tasks"])
def test_the_same_input_gives_the_same_bytes(
    prepared: Path, records: Path, tokenizer_path: Path, tmp_path: Path, way: str
) -> None:
    paths = (str(records), tmp_path / "again", tokenizer_path, CONTEXT_LENGTH)
    if way == "tasks":
        shares = [tokenize_share(*paths, task, 3, shard_bytes=SHARD_BYTES) for task in (2, 0, 1, 0)]
        assert shares == [1, 2, 1, 2]
    workers = 3 if way == "three workers" else 1
    result = prepare(*paths, shard_bytes=SHARD_BYTES, workers=workers, merge_only=way == "tasks")
    assert not result.reused
    assert files_of(tmp_path / "again") == files_of(prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    assert tokenize_share(*paths, 0, 3, shard_bytes=SHARD_BYTES) == 0


@pytest.mark.usefixtures("locks_of_nfs")
def test_preparing_on_nfs(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    paths = (str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH)
    tokenize_share(*paths, 0, 1)
    assert prepare(*paths, merge_only=True).manifest.splits["train"].documents == 323
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_merging_needs_every_task(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    paths = (str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH)
    tokenize_share(*paths, 0, 2)
    with pytest.raises(DataError, match=r"2 of 4 files have not been tokenized for .*out, .* \(first: train/b.jsonl\)"):
        prepare(*paths, merge_only=True)
    tokenize_share(*paths, 1, 2)
    cut_short = tmp_path / ".out.partial/tokens/train/deep/c.jsonl.zst.tokens"
    cut_short.write_bytes(cut_short.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"1 of 4 files .* \(first: train/deep/c.jsonl.zst\)"):
        prepare(*paths, merge_only=True)
    assert prepare(*paths).manifest.splits["train"].documents == 323
    with pytest.raises(DataError, match=r"no task 2 of 2: tasks count from 0 to 1"):
        tokenize_share(*paths, 2, 2)


def test_changed_records_are_tokenized_again(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    """Token files of other records or of another tokenizer are not taken for those asked for."""
    folder = shutil.copytree(records, tmp_path / "in")
    tokenize_share(str(folder), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH, 0, 1)
    (folder / "train/b.jsonl").write_text(json.dumps({"text": "of and to in a is that"}))
    manifest = prepare(str(folder), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH).manifest
    assert manifest.splits["train"].documents == 100 + 1 + 73
    train_tokenizer(str(folder), tmp_path / "other", 300)
    tokenize_share(str(folder), tmp_path / "more", tokenizer_path, CONTEXT_LENGTH, 0, 1)
    with pytest.raises(DataError, match="4 of 4 files have not been tokenized"):
        prepare(str(folder), tmp_path / "more", tmp_path / "other", CONTEXT_LENGTH, merge_only=True)


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


def test_an_output_that_is_a_link_stays_one(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "large/data"
    (tmp_path / "large").mkdir()
    link.symlink_to(target)
    for length in (CONTEXT_LENGTH, CONTEXT_LENGTH + 1):
        prepare(str(records), link, tokenizer_path, length, overwrite=True)
        assert load_manifest(str(target)).context_length == length
        assert link.readlink() == target
        names = [path.name for folder in (tmp_path, target.parent) for path in folder.iterdir()]
        assert sorted(names) == ["data", "large", "link"]


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
        prepare(str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH, shard_bytes=33)
    with pytest.raises(DataError, match="No folder"):
        prepare(str(tmp_path), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_ends_at_the_manifest(records: Path, tokenizer_path: Path, tmp_path: Path, workers: int) -> None:
    seen: list[Progress] = []
    paths = (str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH)
    splits = prepare(*paths, workers=workers, progress=seen.append).manifest.splits.values()
    documents, tokens = sum(split.documents for split in splits), sum(split.tokens for split in splits)
    size = sum(path.stat().st_size for path in records.rglob("*.jsonl*"))
    assert seen[3] == Progress("tokenize", size, size, documents, tokens)
    assert seen[4:] == [Progress("pack", number, 2, documents, tokens) for number in (1, 2)]
    assert [report.tokens for report in seen] == sorted(report.tokens for report in seen)


PREPARE = """
import sys, resource, signal
from mesatron_data.errors import DiskFullError
from mesatron_data.shards import prepare
mode, workers, allowed, *arguments = sys.argv[1:]
if mode == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
reports = 0
def progress(report):
    global reports
    reports += 1
    if str(reports) == mode:
        print(report.step, flush=True)
        sys.stdin.read()
try:
    settings = {"shard_bytes": 3000, "workers": int(workers), "allow_truncated_files": bool(allowed)}
    prepare(*arguments, 16, **settings, progress=progress)
except DiskFullError as error:
    print(error)
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_one_line(records: Path, tokenizer_path: Path, tmp_path: Path, workers: str) -> None:
    arguments = ["limit", workers, "", str(records), str(tmp_path / "out"), str(tokenizer_path)]
    done = subprocess.run([sys.executable, "-c", PREPARE, *arguments], capture_output=True, text=True, check=True)
    assert (
        done.stdout
        == f"No space left while writing {tmp_path}/out: free some space, or choose another output folder.\n"
    )
    assert not (tmp_path / "out").exists()
    prepare(str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_space_is_told_from_other_faults(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError), writing(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(DataError, match="Permission denied") as caught, writing(tmp_path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert not isinstance(caught.value, DiskFullError)


def test_a_truncated_file_is_refused_unless_asked_for(
    records: Path, tokenizer_path: Path, tmp_path: Path, short_path: Path
) -> None:
    """Nothing is tokenized again once it is asked for, and the manifest names the file."""
    folder = shutil.copytree(records, tmp_path / "in")
    broken = folder / "train/deep/c.jsonl.zst"
    broken.write_bytes(broken.read_bytes()[:-100])
    size = broken.stat().st_size
    paths = (str(folder), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH)
    with pytest.raises(DataError, match=rf"1 files end early .*c.jsonl.zst \(read {size:,} of {size:,} bytes"):
        prepare(*paths)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.tokens")}
    with stopped_at(5, 1, folder, tokenizer_path, tmp_path, short_path, allow_truncated_files="1") as reached:
        assert reached == "pack"
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.tokens")} == made
    manifest = prepare(*paths, allow_truncated_files=True).manifest
    assert manifest == load_manifest(str(tmp_path / "out"))
    assert manifest.splits["train"].truncated == {"train/deep/c.jsonl.zst": [size, size]}
    assert 250 <= manifest.splits["train"].documents < 323
    with pytest.raises(DataError, match="1 files end early"):
        train_tokenizer(str(folder), tmp_path / "tokenizer", 320)


@contextmanager
def stopped_at(
    report: int, workers: int, records: Path, tokenizer: Path, tmp_path: Path, temporary: Path,
    allow_truncated_files: str = "",
) -> Iterator[str]:  # fmt: skip
    """A run of its own session, at its n-th report of progress; killed on leaving, its workers by its end alone."""
    arguments = [
        str(report), str(workers), allow_truncated_files, str(records), str(tmp_path / "out"), str(tokenizer)
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", PREPARE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True, env=os.environ | {"TMPDIR": str(temporary)},  # for its fork server's socket
    ) as run:  # fmt: skip
        assert run.stdout is not None
        yield run.stdout.readline().strip()
        family = psutil.Process(run.pid).children(recursive=True)
        assert (len(family) > workers) == (workers > 1)
        run.kill()
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive


def test_a_killed_run_is_gone_on_with(
    records: Path, tokenizer_path: Path, prepared: Path, tmp_path: Path, short_path: Path
) -> None:
    work = tmp_path / ".out.partial"
    made: dict[Path, int] = {}
    for report, workers, step in [(2, 1, "tokenize"), (1, 2, "tokenize"), (7, 2, "pack"), (8, 1, "pack")]:
        with stopped_at(report, workers, records, tokenizer_path, tmp_path, short_path) as reached:
            assert reached == step
            with pytest.raises(DataError, match="Another run is writing"):
                prepare(str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH, shard_bytes=SHARD_BYTES)
        assert not (tmp_path / "out").exists()
        finished = [path for path in work.rglob("*.json") if path.name != "index.json"]
        assert len(finished) >= report
        assert {path: path.stat().st_mtime_ns for path in made} == made, "what is finished is not made again"
        made = {path: path.stat().st_mtime_ns for path in finished}
    prepare(str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH, shard_bytes=SHARD_BYTES)
    assert files_of(tmp_path / "out") == files_of(prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_run_killed_at_its_very_end_left_is_removed(prepared: Path, records: Path, tokenizer_path: Path) -> None:
    work = prepared.with_name(f".{prepared.name}.partial")
    (work / "tokens").mkdir(parents=True)
    assert prepare(str(records), prepared, tokenizer_path, CONTEXT_LENGTH, shard_bytes=SHARD_BYTES).reused
    assert not work.exists()


@pytest.mark.parametrize("output", ["stays", "is gone"])
@pytest.mark.parametrize("left", ["nothing", "a shard cut short"])
def test_notes_that_outlive_their_shards_are_not_believed(
    records: Path, tokenizer_path: Path, prepared: Path, tmp_path: Path, output: str, left: str
) -> None:
    """What a run killed at its very end left: the output in its place, and the notes of its shards."""
    paths, work = (str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH), tmp_path / ".out.partial"

    def keep(progress: Progress) -> None:
        if (progress.step, progress.done) == ("pack", progress.total):
            shutil.copytree(work, tmp_path / "left")

    prepare(*paths, shard_bytes=SHARD_BYTES, progress=keep)
    (tmp_path / "left").rename(work)
    shards = sorted(work.glob("*/data/*/*.zstd"))
    assert len(shards) > 3
    for shard in shards[left == "a shard cut short" :]:
        shard.unlink()
    if left == "a shard cut short":
        shards[0].write_bytes(shards[0].read_bytes()[:-1])
    if output == "is gone":
        shutil.rmtree(tmp_path / "out")
    prepare(*paths, shard_bytes=SHARD_BYTES, overwrite=output == "stays")
    assert files_of(tmp_path / "out") == files_of(prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_that_vanish_are_missed_before_the_manifest(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    def lose(progress: Progress) -> None:
        if (progress.step, progress.done) == ("pack", progress.total):
            next(tmp_path.glob(".out.partial/*/data/train/*.zstd")).unlink()

    paths = (str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH)
    with pytest.raises(DataError, match=r"shard.00000.mds.zstd is no longer what was stored there: remove .*partial"):
        prepare(*paths, progress=lose)
    assert not (tmp_path / "out").exists()


def test_a_killed_worker_is_an_error(records: Path, tokenizer_path: Path, tmp_path: Path) -> None:
    def kill_a_worker(progress: Progress) -> None:
        for server in psutil.Process().children():
            for worker in server.children():
                worker.kill()

    paths = (str(records), tmp_path / "out", tokenizer_path, CONTEXT_LENGTH)
    with pytest.raises(DataError, match="A worker process was killed"):
        prepare(*paths, workers=2, progress=kill_a_worker)
    assert prepare(*paths, workers=2).manifest.splits["train"].documents == 323


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


def test_a_manifest_from_before_packings_and_cleaning_is_read(prepared: Path, tmp_path: Path) -> None:
    manifest = json.loads((prepared / "manifest.json").read_text())
    expected = load_manifest(str(prepared))
    for key in ("packing", "tokenizer_file", "index_sha256", "sha256"):
        del manifest[key]
    for split in manifest["splits"].values():
        for key in ("duplicates", "removed", "padding_tokens", "cuts", "source_samples"):
            del split[key]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    older = load_manifest(str(tmp_path))
    assert (older.packing, older.tokenizer_file) == ("concatenate", "tokenizer.model")
    indexes = {split: json.loads((prepared / split / "index.json").read_text()) for split in ("train", "validation")}
    assert older.content_fingerprint(indexes) == expected.fingerprint


def test_reading_and_preparing_need_no_torch_to_be_imported() -> None:
    """The command line imports these modules to answer --help."""
    code = """if True:
        import sys
        from mesatron_data import inspect, manifest, mds, pack, records, shards, tokenizer, tokens, verify, workers
        print({"torch", "streaming"} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
