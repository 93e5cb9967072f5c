"""Turn a folder of text records into MDS shards: read, tokenize, pack, write (`mesatron data prepare`), and read
shards back."""

import fcntl
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from mesatron_data.errors import DataError
from mesatron_data.files import sha256, sync, write_atomically, writing
from mesatron_data.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Manifest,
    SourceCounts,
    SplitCounts,
    length_class,
    load_manifest,
    read_json,
    sorted_counts,
)
from mesatron_data.pack import Packer, Sample
from mesatron_data.records import SPLITS, Counts, Document, InputFile, check_skipped, list_files, read_documents
from mesatron_data.tokenizer import MODEL_FILE, Tokenizer

INDEX_FILE = "index.json"
COMPRESSION = "zstd:7"
HASHES = ["sha1", "xxh64"]
ENCODE_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Progress:
    """How far `prepare` is: input files done of all files, documents and tokens so far."""

    files_done: int
    files: int
    documents: int
    tokens: int


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
    progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """Write the documents of `input_folder` (local path or URL) as packed samples into `output_folder` (local).

    Documents keep their input order. The work is done in a hidden sibling folder that is renamed at the end, so
    OUTPUT is complete or absent; what a killed run left there is removed by the next. `shard_bytes` bounds a shard's
    uncompressed size. Raises DataError for unusable input, for more than `max_skipped_fraction` of a split's records
    skipped, and when OUTPUT holds anything else than the result of the same call (with `overwrite`, other prepared
    data are replaced); DiskFullError without space.
    """
    output = Path(output_folder).absolute()
    tokenizer = Tokenizer.load(tokenizer_path)
    token_dtype = "uint16" if tokenizer.vocabulary_size <= 1 << 16 else "uint32"
    if context_length < 1:
        raise DataError(f"context_length is {context_length}: give at least 1 token.")
    if shard_bytes < 16 * context_length + 4096:
        raise DataError(
            f"shard_bytes {shard_bytes} cannot hold samples of {context_length} tokens: give "
            f"{16 * context_length + 4096} or more."
        )
    files = {split: list_files(input_folder, split) for split in SPLITS}
    request = _request(files, tokenizer.sha256, context_length, shard_bytes)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        existing = _existing(output, request, overwrite)
        if existing is not None:
            return Prepared(existing, reused=True)
    with writing(output), _work_folder(output) as work:
        manifest = Manifest(
            tokenizer_sha256=tokenizer.sha256,
            vocabulary_size=tokenizer.vocabulary_size,
            bos_id=tokenizer.bos_id,
            context_length=context_length,
            token_dtype=token_dtype,
            sources=[],
            splits={},
            request=request,
        )
        reporter = _Reporter(sum(map(len, files.values())), progress)
        for split in SPLITS:
            manifest.splits[split] = _write_split(
                work, split, files[split], tokenizer, manifest, shard_bytes, max_skipped_fraction, reporter
            )
        manifest.fingerprint = manifest.content_fingerprint(
            {split: read_json(str(work), f"{split}/{INDEX_FILE}") for split in SPLITS}
        )
        write_atomically(work / MODEL_FILE, tokenizer.model)
        write_atomically(work / MANIFEST_FILE, manifest.to_json())
        _put_in_place(work, output)
    return Prepared(manifest, reused=False)


def shard_files(folder: str | Path, split: str) -> list[dict[str, Any]]:
    """Return the shard descriptions of a split's index.json (keys used: samples, raw_data and zip_data with basename,
    bytes, hashes).

    Raises DataError when the index is missing or is not one that `prepare` wrote.
    """
    shards = read_json(str(folder), f"{split}/{INDEX_FILE}").get("shards")
    if not isinstance(shards, list) or not all(
        shard.get("zip_data") and shard.get("compression") == COMPRESSION for shard in shards
    ):
        raise DataError(
            f"{folder}/{split}/{INDEX_FILE} was not written by `mesatron data prepare`: prepare again with --overwrite."
        )
    return shards


def decode_shard(shard: dict[str, Any], raw: bytes) -> Iterator[Sample]:
    """Yield the samples of one shard, given its description and its uncompressed bytes."""
    import numpy as np

    from mesatron_data.mosaic import streaming

    reader = streaming.base.format.reader_from_json("", "", shard)
    offsets = np.frombuffer(raw, np.uint32, count=shard["samples"] + 1, offset=4)
    for begin, end in itertools.pairwise(offsets):
        yield Sample(**reader.decode_sample(raw[begin:end]))


def read_samples(folder: str | Path, split: str) -> Iterator[Sample]:
    """Yield every stored sample of a local prepared folder in order."""
    for shard in shard_files(folder, split):
        path = Path(folder) / split / shard["zip_data"]["basename"]
        try:
            raw = zstandard.ZstdDecompressor().decompress(path.read_bytes(), shard["raw_data"]["bytes"])
        except (zstandard.ZstdError, OSError) as error:
            raise DataError(
                f"Shard {path} cannot be read ({' '.join(str(error).split())}): restore it or prepare again with "
                "--overwrite."
            ) from error
        yield from decode_shard(shard, raw)


class _Reporter:
    """Adds up progress over files and passes it on."""

    def __init__(self, files: int, progress: Callable[[Progress], None] | None) -> None:
        self._files = files
        self._progress = progress
        self.files_done = self.documents = self.tokens = 0

    def report(self) -> None:
        if self._progress is not None:
            self._progress(Progress(self.files_done, self._files, self.documents, self.tokens))


def _request(files: dict[str, list[InputFile]], tokenizer_sha256: str, context_length: int, shard_bytes: int) -> str:
    inputs = {
        split: [(file.name, file.bytes, file.modified) for file in split_files] for split, split_files in files.items()
    }
    return sha256(repr((FORMAT_VERSION, inputs, tokenizer_sha256, context_length, shard_bytes)).encode())


def _existing(output: Path, request: str, overwrite: bool) -> Manifest | None:
    """Return the manifest when `output` is the result of the same request; None when it may be replaced; else raise
    DataError."""
    if not (output / MANIFEST_FILE).is_file():
        raise DataError(
            f"{output} exists and is not a prepared data folder: choose another output folder or remove it."
        )
    if overwrite:
        return None
    manifest = load_manifest(str(output))
    if manifest.request != request:
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
def _work_folder(output: Path) -> Iterator[Path]:
    """Give an empty sibling folder, locked against a second run; it is removed if the block fails."""
    work = output.with_name(f".{output.name}.partial")
    work.mkdir(parents=True, exist_ok=True)
    lock = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"Another run is writing {output}: wait for it or choose another output folder.") from error
        try:
            for leftover in work.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield work
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _put_in_place(work: Path, output: Path) -> None:
    replaced = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.rename(replaced)
    work.rename(output)
    sync(output.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_split(
    work: Path,
    split: str,
    files: list[InputFile],
    tokenizer: Tokenizer,
    manifest: Manifest,
    shard_bytes: int,
    max_skipped_fraction: float,
    reporter: _Reporter,
) -> SplitCounts:
    """Write one split's shards; new source names are appended to manifest.sources."""
    from mesatron_data.mosaic import streaming

    counts = Counts()
    result = SplitCounts()
    lengths: Counter[int] = Counter()
    packer = Packer(manifest.context_length, manifest.bos_id, manifest.token_dtype)
    columns = {
        "tokens": f"ndarray:{manifest.token_dtype}:{manifest.context_length + 1}",
        "document_starts": "ndarray:int32",
        "sources": "ndarray:uint16",
    }
    writer = streaming.MDSWriter(
        columns=columns, out=str(work / split), compression=COMPRESSION, hashes=HASHES, size_limit=shard_bytes
    )
    try:
        for file in files:
            file_counts = Counts()
            for document, ids in _encode(file, tokenizer, file_counts):
                if document.source not in manifest.sources:
                    manifest.sources.append(document.source)
                source = result.sources.setdefault(document.source, SourceCounts())
                source.documents += 1
                source.tokens += len(ids) + 1
                source.bytes += len(document.text.encode())
                lengths[length_class(len(ids) + 1)] += 1
                for sample in packer.add(ids, manifest.sources.index(document.source)):
                    writer.write(vars(sample))
                    result.samples += 1
                reporter.documents += 1
                reporter.tokens += len(ids) + 1
                reporter.report()
            counts.add(file_counts)
            reporter.files_done += 1
            reporter.report()
        check_skipped(counts, max_skipped_fraction, f"{split}/")
        if not result.samples:
            raise DataError(
                f"The {split} records give {packer.tail_tokens} tokens, but one sample takes "
                f"{manifest.context_length + 1} "
                f"(context_length + 1): give more text or a smaller context_length."
            )
        writer.finish()
    finally:
        writer.cancel_future_jobs()
    for path in (work / split).iterdir():
        sync(path)
    sync(work / split)
    result.dropped_tail_tokens = packer.tail_tokens
    result.document_lengths = sorted_counts(lengths)
    result.skipped = sorted_counts(counts.skipped)
    result.skipped_places = dict(sorted(counts.places.items()))
    result.normalised = sorted_counts(counts.normalised)
    return result


def _encode(file: InputFile, tokenizer: Tokenizer, counts: Counts) -> Iterator[tuple[Document, list[int]]]:
    """Yield the documents of one file with their ids, tokenized in groups; files do not depend on each other."""
    group: list[Document] = []
    characters = 0
    for document in read_documents(file, counts):
        group.append(document)
        characters += len(document.text)
        if characters >= ENCODE_CHARACTERS:
            yield from zip(group, tokenizer.encode_batch([member.text for member in group]), strict=True)
            group, characters = [], 0
    yield from zip(group, tokenizer.encode_batch([member.text for member in group]), strict=True)
