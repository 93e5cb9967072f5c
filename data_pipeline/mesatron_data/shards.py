"""Turn a folder of text records into MDS shards (`mesatron data prepare`).

Three steps, each over any number of processes. Every file of records is tokenized into a token file; what is wanted of
each token file is counted; then every shard is cut from the token files laid end to end. Which samples a shard holds
follows from its number, so the shards depend neither on the number of processes nor on what was done by which.
"""

import itertools
import shutil
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mesatron_data.choice import ChosenFile, Segment, survey
from mesatron_data.duplicates import find_duplicates
from mesatron_data.errors import DataError
from mesatron_data.files import sha256, writing
from mesatron_data.manifest import MANIFEST_FILE, Manifest, SplitCounts, check_sources
from mesatron_data.mds import INDEX_FILE, ShardJob, WrittenShard, index_of, write_shard
from mesatron_data.pack import sample_count
from mesatron_data.plan import Options, Plan, clear, existing, locked, make_plan, put_in_place
from mesatron_data.progress import Progress, Report
from mesatron_data.records import SPLITS, check_skipped, check_truncated
from mesatron_data.store import is_remote, list_sizes
from mesatron_data.tokens import TokenJob, find, read_tables, tokenize
from mesatron_data.verify import note_sound
from mesatron_data.workers import Workers, open_workers

PRELOADED = "mesatron_data.mosaic"
"""What processes import before they begin: it takes seconds."""


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
    options: Options | None = None,
) -> Prepared:
    """Write the documents of `input_folder` as packed samples into `output_folder` (both local paths or URLs).

    Documents keep their input order, and the output is the same for any number of `workers`. OUTPUT is complete or
    absent (in a store: has a manifest.json or not); a killed run is gone on with where it stopped, but for the file or
    shard each worker was at. `shard_bytes` bounds the tokens of a shard, uncompressed. `merge_only` takes the token
    files that `tokenize_share` made and makes none. Raises DataError for unusable input, for files that end early
    unless `allow_truncated_files`, for more than `max_skipped_fraction` of a split's records skipped, and when OUTPUT
    holds anything else than the result of the same call (with `overwrite`, other prepared data are replaced);
    DiskFullError without space.
    """
    plan = make_plan(input_folder, output_folder, tokenizer_path, context_length, shard_bytes, options or Options())
    known = existing(plan, overwrite)
    if known is not None:
        if plan.work.exists():  # of a run that was killed at its very end
            with locked(plan, alone=True):
                shutil.rmtree(plan.work)
        return Prepared(known, reused=True)
    with writing(plan.place), locked(plan, alone=True):
        clear(plan)
        manifest = Manifest(
            tokenizer_sha256=plan.tokenizer.sha256,
            vocabulary_size=plan.tokenizer.vocabulary_size,
            bos_id=plan.tokenizer.bos_id,
            context_length=context_length,
            token_dtype=plan.token_dtype,
            sources=[],
            splits={split: SplitCounts() for split in SPLITS},
            request=plan.request,
            packing=plan.options.packing,
            tokenizer_file=plan.tokenizer.file,
        )
        with open_workers(workers, PRELOADED) as pool:
            counts = _found(pool, plan) if merge_only else _tokenize(pool, plan.jobs, progress)
            check_truncated(
                {name: sizes for count in counts for name, sizes in count.truncated.items()}, allow_truncated_files
            )
            for split in SPLITS:
                result = manifest.splits[split]
                for job, count in zip(plan.jobs, counts, strict=True):
                    if job.split == split:
                        result.add(count)
                places = result.skipped_places
                check_skipped(result.documents, result.skipped, places, max_skipped_fraction, f"{split}/")
            chosen = _choose(pool, plan, counts, manifest)
            shards = _pack(pool, plan, chosen, manifest, progress)
        for split in SPLITS:
            _check_samples(manifest, split)
        manifest.fingerprint = manifest.content_fingerprint(
            {split: {"shards": [written.shard for written in shards[split]]} for split in SPLITS}
        )
        _check_stored(plan, shards)
        indexes = {split: index_of([one.shard for one in shards[split]]) for split in SPLITS}
        manifest.index_sha256 = {split: sha256(index) for split, index in indexes.items()}
        small = {f"{split}/{INDEX_FILE}": index for split, index in indexes.items()}
        small |= {plan.tokenizer.file: plan.tokenizer.model, MANIFEST_FILE: manifest.to_json()}
        put_in_place(plan, small)
        note_sound(plan.output)
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
    options: Options | None = None,
) -> int:
    """Make the token files of task `task` (from 0) of `tasks`, for `prepare` with `merge_only`.

    Of the files of records in the order of their names, train before validation, task k of n has files k, k + n, ...
    Tasks may run at the same time, on several machines that share a file system, and again. Returns how many files the
    task has, 0 when `prepare` has been through already. Arguments and errors are those of `prepare`.
    """
    if not 0 <= task < tasks:
        raise DataError(f"There is no task {task} of {tasks}: tasks count from 0 to {tasks - 1}.")
    plan = make_plan(input_folder, output_folder, tokenizer_path, context_length, shard_bytes, options or Options())
    if existing(plan, overwrite) is not None:
        return 0
    share = plan.jobs[task::tasks]
    with writing(plan.place), locked(plan, alone=False), open_workers(workers, PRELOADED) as pool:
        _tokenize(pool, share, progress)
    return len(share)


def _tokenize(pool: Workers, jobs: list[TokenJob], progress: Report | None) -> list[SplitCounts]:
    total = sum(job.file.bytes for job in jobs)
    done = documents = tokens = 0

    def report(job: TokenJob, counts: SplitCounts) -> None:
        nonlocal done, documents, tokens
        done, documents, tokens = done + job.file.bytes, documents + counts.documents, tokens + counts.tokens
        if progress is not None:
            progress(Progress("tokenize", done, total, documents, tokens))

    return pool.map(tokenize, jobs, report)


def _found(pool: Workers, plan: Plan) -> list[SplitCounts]:
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


Chosen = list[tuple[ChosenFile, SplitCounts]]


def _choose(pool: Workers, plan: Plan, counts: list[SplitCounts], manifest: Manifest) -> dict[str, Chosen]:
    """Count what is wanted of each token file, by split; the manifest gets sources and counts of that alone."""
    documents = [count.documents for count in counts]
    begins = [end - own for end, own in zip(itertools.accumulate(documents), documents, strict=True)]
    hashes = (
        read_tables(job.path, count.tokens, count.documents, job.token_dtype).hashes
        for job, count in zip(plan.jobs, counts, strict=True)
    )
    repeated = find_duplicates(hashes, sum(documents), plan.work / plan.request / "duplicates")
    files = [
        ChosenFile(
            job.path, count.tokens, count.documents, job.token_dtype, tuple(count.sources), repeated, begin,
            plan.options.cleaning,
        )
        for job, count, begin in zip(plan.jobs, counts, begins, strict=True)
    ]  # fmt: skip
    surveys = pool.map(survey, files, lambda file, result: None)
    chosen: dict[str, Chosen] = {split: [] for split in SPLITS}
    for split in manifest.splits.values():
        split.sources, split.document_lengths = {}, {}
    for job, file, result in zip(plan.jobs, files, surveys, strict=True):
        chosen[job.split].append((file, result))
        manifest.splits[job.split].add(result)
    manifest.sources = list(dict.fromkeys(source for split in manifest.splits.values() for source in split.sources))
    check_sources(len(manifest.sources), "all files together")
    return chosen


def _pack(
    pool: Workers, plan: Plan, chosen: dict[str, Chosen], manifest: Manifest, progress: Report | None
) -> dict[str, list[WrittenShard]]:
    """Write the shards of every split; the manifest gets what became of them."""
    jobs: list[ShardJob] = []
    owners: list[tuple[str, str]] = []
    for split in SPLITS:
        folder, notes = f"{plan.folder}/{split}", plan.work / plan.request / "notes" / split
        notes.mkdir(parents=True, exist_ok=True)
        if not is_remote(folder):
            Path(folder).mkdir(parents=True, exist_ok=True)
        parts = list(_parts(plan, chosen[split], manifest, split))
        owners += [(split, source or "") for source, _ in parts]
        jobs += [
            ShardJob(
                folder, notes, number, segments, plan.token_dtype, plan.context_length, plan.options.packing,
                manifest.bos_id,
            )
            for number, (_, segments) in enumerate(parts)
        ]  # fmt: skip
    documents = sum(split.documents for split in manifest.splits.values())
    tokens = sum(split.tokens for split in manifest.splits.values())
    done = itertools.count(1)

    def report(job: ShardJob, shard: WrittenShard | None) -> None:
        number = next(done)
        if progress is not None:
            progress(Progress("pack", number, len(jobs), documents, tokens))

    written: dict[str, list[WrittenShard]] = {split: [] for split in SPLITS}
    for (split, source), shard in zip(owners, pool.map(write_shard, jobs, report), strict=True):
        if shard is None:
            continue
        written[split].append(shard)
        counts = manifest.splits[split]
        counts.samples += shard.shard["samples"]
        counts.padding_tokens += shard.padding_tokens
        counts.cuts += shard.cuts
        if source:
            counts.source_samples[source] = counts.source_samples.get(source, 0) + shard.shard["samples"]
    return written


def _parts(plan: Plan, chosen: Chosen, manifest: Manifest, split: str) -> Iterator[tuple[str | None, list[Segment]]]:
    """Yield, for each shard of a split, the source it is of (None: of all) and the parts of token files it is cut from.

    Without cuts between documents a shard takes those that begin in its share of the stream, so it may hold a few
    samples more or fewer than another.
    """
    whole = plan.options.packing == "best_fit"
    step = plan.samples_per_shard * plan.context_length
    streams = list(manifest.splits[split].sources) if plan.options.by_source and split == "train" else [None]
    for source in streams:
        sizes = [(file, _tokens_of(counts, source)) for file, counts in chosen]
        filled = [(file, size) for file, size in sizes if size]
        ends = list(itertools.accumulate(size for _, size in filled))
        total = ends[-1] if ends else 0
        samples, left = sample_count(total, plan.context_length)
        if not whole:
            manifest.splits[split].dropped_tail_tokens += left
        for begin in range(0, total if whole else samples * plan.context_length, step):
            end = min(begin + step, total) if whole else min(begin + step, samples * plan.context_length) + 1
            segments = []
            for number in range(bisect_right(ends, begin), len(ends)):
                file, size = filled[number]
                start = ends[number] - size
                if start >= end:
                    break
                numbers = tuple(
                    manifest.sources.index(name) if name in manifest.sources else 0 for name in file.sources
                )
                segments.append(Segment(file, source, max(begin - start, 0), min(end - start, size), whole, numbers))
            yield source, segments


def _tokens_of(counts: SplitCounts, source: str | None) -> int:
    if source is None:
        return counts.tokens
    return counts.sources[source].tokens if source in counts.sources else 0


def _check_samples(manifest: Manifest, split: str) -> None:
    counts = manifest.splits[split]
    if not counts.samples:
        raise DataError(
            f"The {split} records give {counts.tokens} tokens, but one sample takes {manifest.context_length + 1} "
            "(context_length + 1): give more text or a smaller context_length."
        )


def _check_stored(plan: Plan, shards: dict[str, list[WrittenShard]]) -> None:
    """Before a manifest vouches for them: see that all shards are there, for their notes may be of an earlier run."""
    sizes = list_sizes(plan.folder)
    for split, written in shards.items():
        for shard in (one.shard["zip_data"] for one in written):
            if sizes.get(f"{split}/{shard['basename']}") != shard["bytes"]:
                raise DataError(
                    f"{plan.folder}/{split}/{shard['basename']} is no longer what was stored there: remove {plan.work} "
                    "and start again."
                )
