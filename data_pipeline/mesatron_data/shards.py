"""Turn a folder of text records into MDS shards (`mesatron data prepare`).

Two steps, each over any number of processes. Every file of records is tokenized into a token file; then every shard is
cut from the token files laid end to end. Which samples a shard holds follows from its number, so the shards depend
neither on the number of processes nor on what was done by which. All happens in a hidden sibling of the output folder,
which keeps what is finished when a run is killed:

    .OUTPUT.partial/tokens/        token files, by name of the file of records
    .OUTPUT.partial/REQUEST/notes  descriptions of finished shards
    .OUTPUT.partial/REQUEST/data   what becomes OUTPUT
"""

import fcntl
import itertools
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mesatron_data.errors import DataError
from mesatron_data.files import sha256, sync, write_atomically, writing
from mesatron_data.manifest import FORMAT_VERSION, MANIFEST_FILE, Manifest, SplitCounts, load_manifest, read_json
from mesatron_data.mds import INDEX_FILE, ShardJob, shard_files, write_index, write_shard
from mesatron_data.pack import sample_count
from mesatron_data.records import SPLITS, check_skipped, check_truncated, list_files
from mesatron_data.tokenizer import MODEL_FILE, Tokenizer
from mesatron_data.tokens import PARTIAL_SUFFIX, Segment, TokenJob, find, tokenize
from mesatron_data.workers import Workers, open_workers


@dataclass(frozen=True)
class Progress:
    """How far a step is: `done` of `total` bytes of records (step "tokenize") or shards (step "pack"), and the
    documents and tokens of what is done."""

    step: str
    done: int
    total: int
    documents: int
    tokens: int


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`; `reused` says that the folder had already been made from the same input and settings."""

    manifest: Manifest
    reused: bool


def prepare(
    input_folder: str,
    output_folder: str | Path,
    tokenizer_path: str | Path,
    context_length: int,
    max_skipped_fraction: float = 0.01,
    shard_bytes: int = 1 << 26,
    overwrite: bool = False,
    workers: int = 1,
    merge_only: bool = False,
    allow_truncated_files: bool = False,
    progress: Report | None = None,
) -> Prepared:
    """Write the documents of `input_folder` (local path or URL) as packed samples into `output_folder` (local).

    Documents keep their input order, and the output is the same for any number of `workers`. OUTPUT is complete or
    absent; a killed run is gone on with where it stopped, but for the file or shard each worker was at. `shard_bytes`
    bounds the tokens of a shard, uncompressed. `merge_only` takes the token files that `tokenize_share` made and makes
    none. Raises DataError for unusable input, for files that end early unless `allow_truncated_files`, for more than
    `max_skipped_fraction` of a split's records skipped, and when OUTPUT holds anything else than the result of the same
    call (with `overwrite`, other prepared data are replaced); DiskFullError without space.
    """
    plan = _plan(input_folder, output_folder, tokenizer_path, context_length, shard_bytes)
    existing = _existing(plan, overwrite)
    if existing is not None:
        if plan.work.exists():  # of a run that was killed at its very end
            with _locked(plan, alone=True):
                shutil.rmtree(plan.work)
        return Prepared(existing, reused=True)
    with writing(plan.output), _locked(plan, alone=True):
        _remove_leftovers(plan)
        folder = plan.work / plan.request
        manifest = Manifest(
            tokenizer_sha256=plan.tokenizer.sha256,
            vocabulary_size=plan.tokenizer.vocabulary_size,
            bos_id=plan.tokenizer.bos_id,
            context_length=context_length,
            token_dtype=plan.token_dtype,
            sources=[],
            splits={split: SplitCounts() for split in SPLITS},
            request=plan.request,
        )
        jobs = plan.jobs
        with open_workers(workers) as pool:
            counts = _found(pool, plan) if merge_only else _tokenize(pool, jobs, progress)
            check_truncated(
                {name: sizes for count in counts for name, sizes in count.truncated.items()}, allow_truncated_files
            )
            by_split = {}
            for split in SPLITS:
                taken = [(job, count) for job, count in zip(jobs, counts, strict=True) if job.split == split]
                _sum_up(manifest, split, [count for _, count in taken], max_skipped_fraction)
                by_split[split] = taken
            _pack(pool, by_split, manifest, folder, plan.samples_per_shard, progress)
        manifest.fingerprint = manifest.content_fingerprint(
            {split: read_json(str(folder / "data"), f"{split}/{INDEX_FILE}") for split in SPLITS}
        )
        write_atomically(folder / "data" / MODEL_FILE, plan.tokenizer.model)
        write_atomically(folder / "data" / MANIFEST_FILE, manifest.to_json())
        _put_in_place(folder / "data", plan.output)
        shutil.rmtree(plan.work)
    return Prepared(manifest, reused=False)


def tokenize_share(
    input_folder: str,
    output_folder: str | Path,
    tokenizer_path: str | Path,
    context_length: int,
    task: int,
    tasks: int,
    shard_bytes: int = 1 << 26,
    overwrite: bool = False,
    workers: int = 1,
    progress: Report | None = None,
) -> int:
    """Make the token files of task `task` (from 0) of `tasks`, for `prepare` with `merge_only`.

    Of the files of records in the order of their names, train before validation, task k of n has files k, k + n, ...
    Tasks may run at the same time, on several machines that share a file system, and again. Returns how many files the
    task has, 0 when `prepare` has been through already. Arguments and errors are those of `prepare`.
    """
    if not 0 <= task < tasks:
        raise DataError(f"There is no task {task} of {tasks}: tasks count from 0 to {tasks - 1}.")
    plan = _plan(input_folder, output_folder, tokenizer_path, context_length, shard_bytes)
    if _existing(plan, overwrite) is not None:
        return 0
    share = plan.jobs[task::tasks]
    with writing(plan.output), _locked(plan, alone=False), open_workers(workers) as pool:
        _tokenize(pool, share, progress)
    return len(share)


@dataclass(frozen=True)
class _Plan:
    """What a call is to do: `jobs` for every file of records, all under `work`; `request` identifies input and
    settings."""

    output: Path
    work: Path
    tokenizer: Tokenizer
    token_dtype: str
    samples_per_shard: int
    jobs: list[TokenJob]
    request: str


def _plan(
    input_folder: str, output_folder: str | Path, tokenizer_path: str | Path, context_length: int, shard_bytes: int
) -> _Plan:
    output = Path(output_folder).absolute()
    work = output.with_name(f".{output.name}.partial")
    tokenizer = Tokenizer.load(tokenizer_path)
    dtype = "uint16" if tokenizer.vocabulary_size <= 1 << 16 else "uint32"
    if context_length < 1:
        raise DataError(f"context_length is {context_length}: give at least 1 token.")
    sample_bytes = (context_length + 1) * np.dtype(dtype).itemsize
    if shard_bytes < sample_bytes:
        raise DataError(
            f"shard_bytes {shard_bytes} cannot hold samples of {context_length} tokens: give {sample_bytes} or more."
        )
    jobs = [
        TokenJob(split, file, work / "tokens" / file.name, Path(tokenizer_path), tokenizer.sha256, dtype)
        for split in SPLITS
        for file in list_files(input_folder, split)
    ]
    inputs = [job.request for job in jobs]
    request = sha256(repr((FORMAT_VERSION, inputs, context_length, shard_bytes)).encode())
    return _Plan(output, work, tokenizer, dtype, shard_bytes // sample_bytes, jobs, request)


def _existing(plan: _Plan, overwrite: bool) -> Manifest | None:
    """Return the manifest when the output is there, of the same request; None when there is none or it may be replaced;
    else raise DataError."""
    output = plan.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / MANIFEST_FILE).is_file():
        raise DataError(
            f"{output} exists and is not a prepared data folder: choose another output folder or remove it."
        )
    if overwrite:
        return None
    manifest = load_manifest(str(output))
    if manifest.request != plan.request:
        raise DataError(
            f"{output} was prepared from other input or settings: choose another output folder or ask to overwrite it."
        )
    for split in SPLITS:
        for shard in shard_files(output, split):
            path = output / split / shard["zip_data"]["basename"]
            if not path.is_file() or path.stat().st_size != shard["zip_data"]["bytes"]:
                raise DataError(f"{path} is missing or cut short: ask to overwrite {output} to prepare it again.")
    return manifest


@contextmanager
def _locked(plan: _Plan, alone: bool) -> Iterator[None]:
    """Make the work folder and hold a lock on it: with `alone` against every other run, else against those that are."""
    plan.work.mkdir(parents=True, exist_ok=True)
    lock = os.open(plan.work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"Another run is writing {plan.output}: wait for it or choose another output folder."
            ) from error
        yield
    finally:
        os.close(lock)


def _remove_leftovers(plan: _Plan) -> None:
    """Remove shards of other requests and what killed runs had only begun."""
    for path in plan.work.iterdir():
        if path.name not in ("tokens", plan.request):
            shutil.rmtree(path)
    for path in plan.work.rglob(f"*{PARTIAL_SUFFIX}"):
        path.unlink()


def _put_in_place(target: Path, output: Path) -> None:
    replaced = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.rename(replaced)
    target.rename(output)
    sync(output.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _tokenize(pool: Workers, jobs: list[TokenJob], progress: Report | None) -> list[SplitCounts]:
    total = sum(job.file.bytes for job in jobs)
    done = documents = tokens = 0

    def report(job: TokenJob, counts: SplitCounts) -> None:
        nonlocal done, documents, tokens
        done, documents, tokens = done + job.file.bytes, documents + counts.documents, tokens + counts.tokens
        if progress is not None:
            progress(Progress("tokenize", done, total, documents, tokens))

    return pool.map(tokenize, jobs, report)


def _found(pool: Workers, plan: _Plan) -> list[SplitCounts]:
    """Return the counts of all token files. Raises DataError when some are not there."""
    jobs = plan.jobs
    found = pool.map(find, jobs, lambda job, counts: None)
    missing = [job.file.name for job, counts in zip(jobs, found, strict=True) if counts is None]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(jobs)} files have not been tokenized for {plan.output}, or have changed since "
            f"(first: {missing[0]}): run all tasks to their end first."
        )
    return [counts for counts in found if counts is not None]


def _sum_up(manifest: Manifest, split: str, counts: list[SplitCounts], max_skipped_fraction: float) -> None:
    """Add up the files of a split; new source names are appended to manifest.sources."""
    result = manifest.splits[split]
    for part in counts:
        result.add(part)
    check_skipped(result.documents, result.skipped, result.skipped_places, max_skipped_fraction, f"{split}/")
    result.samples, result.dropped_tail_tokens = sample_count(result.tokens, manifest.context_length)
    if not result.samples:
        raise DataError(
            f"The {split} records give {result.tokens} tokens, but one sample takes {manifest.context_length + 1} "
            "(context_length + 1): give more text or a smaller context_length."
        )
    manifest.sources += [source for source in result.sources if source not in manifest.sources]


def _pack(
    pool: Workers,
    files: dict[str, list[tuple[TokenJob, SplitCounts]]],
    manifest: Manifest,
    folder: Path,
    samples_per_shard: int,
    progress: Report | None,
) -> None:
    """Write the shards and index of every split."""
    jobs: list[ShardJob] = []
    for split in SPLITS:
        for name in ("data", "notes"):
            (folder / name / split).mkdir(parents=True, exist_ok=True)
        jobs += [
            ShardJob(folder / "data" / split, folder / "notes" / split, number, segments, manifest.context_length)
            for number, segments in enumerate(_segments(files[split], manifest, split, samples_per_shard))
        ]
    documents = sum(split.documents for split in manifest.splits.values())
    tokens = sum(split.tokens for split in manifest.splits.values())
    done = itertools.count(1)

    def report(job: ShardJob, shard: dict[str, Any]) -> None:
        number = next(done)
        if progress is not None:
            progress(Progress("pack", number, len(jobs), documents, tokens))

    shards = pool.map(write_shard, jobs, report)
    for split in SPLITS:
        here = folder / "data" / split
        write_index(here, [shard for job, shard in zip(jobs, shards, strict=True) if job.folder == here])


def _segments(
    files: list[tuple[TokenJob, SplitCounts]], manifest: Manifest, split: str, samples_per_shard: int
) -> Iterator[list[Segment]]:
    """Yield, for each shard of a split, the parts of token files that hold its samples."""
    filled = [(job, counts) for job, counts in files if counts.tokens]
    ends = list(itertools.accumulate(counts.tokens for _, counts in filled))
    length, samples = manifest.context_length, manifest.splits[split].samples
    for first in range(0, samples, samples_per_shard):
        begin, end = first * length, min(first + samples_per_shard, samples) * length + 1
        segments = []
        for number in range(bisect_right(ends, begin), len(ends)):
            job, counts = filled[number]
            start = ends[number] - counts.tokens
            if start >= end:
                break
            segments.append(
                Segment(
                    path=job.path,
                    tokens=counts.tokens,
                    documents=counts.documents,
                    token_dtype=manifest.token_dtype,
                    sources=tuple(manifest.sources.index(source) for source in counts.sources),
                    begin=max(begin - start, 0),
                    end=min(end - start, counts.tokens),
                )
            )
        yield segments
