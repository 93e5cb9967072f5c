"""Token files: the tokens of one file of records, kept between reading the text and packing samples.

NAME.tokens holds the token stream BOS document BOS document ..., then where in it each document begins (int64), then
each document's source as a number (uint16). NAME.json, written last, holds its SHA-256 and what became of the records.
Both are functions of records and tokenizer alone, so two processes that make the same one do not disturb each other.
"""

import functools
import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mesatron_data.errors import DataError
from mesatron_data.files import sha256, sync, write_atomically
from mesatron_data.manifest import SourceCounts, SplitCounts, length_class, sorted_counts
from mesatron_data.records import Counts, Document, InputFile, read_documents
from mesatron_data.tokenizer import Tokenizer

FORMAT_VERSION = 1
ENCODE_CHARACTERS = 1 << 20
READ_BYTES = 1 << 22
PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True)
class TokenJob:
    """One file of records, of a split, to tokenize into `path`.tokens and `path`.json."""

    split: str
    file: InputFile
    path: Path
    tokenizer_path: Path
    tokenizer_sha256: str
    token_dtype: str

    @property
    def request(self) -> str:
        """Identifies records and tokenizer by the records' name, size and time and the tokenizer's hash."""
        file = self.file
        identity = (FORMAT_VERSION, file.name, file.bytes, file.modified, self.tokenizer_sha256, self.token_dtype)
        return sha256(repr(identity).encode())


@dataclass(frozen=True)
class Segment:
    """Tokens `begin` to `end` of the token file at `path`; `sources` are the numbers that its own source numbers stand
    for."""

    path: Path
    tokens: int
    documents: int
    token_dtype: str
    sources: tuple[int, ...]
    begin: int
    end: int


def tokenize(job: TokenJob) -> SplitCounts:
    """Return the counts of a token file, making it unless it is there and sound. Raises DataError for records or a
    tokenizer that cannot be read."""
    known = find(job)
    if known is not None:
        return known
    tokenizer = _tokenizer(job.tokenizer_path, job.tokenizer_sha256)
    job.path.parent.mkdir(parents=True, exist_ok=True)
    counts = Counts()
    result = SplitCounts()
    lengths: Counter[int] = Counter()
    document_lengths: list[int] = []
    sources: list[int] = []
    numbers: dict[str, int] = {}
    digest = hashlib.sha256()
    dtype = np.dtype(job.token_dtype)
    bos = np.array(tokenizer.bos_id, dtype).tobytes()
    partial = job.path.with_name(f"{job.path.name}.{os.uname().nodename}-{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with partial.open("wb") as output:
            for document, ids in _encode(job.file, tokenizer, counts):
                data = bos + array(dtype.char, ids).tobytes()
                digest.update(data)
                output.write(data)
                source = result.sources.setdefault(document.source, SourceCounts())
                source.documents += 1
                source.tokens += len(ids) + 1
                source.bytes += len(document.text.encode())
                lengths[length_class(len(ids) + 1)] += 1
                document_lengths.append(len(ids) + 1)
                sources.append(numbers.setdefault(document.source, len(numbers)))
            begins = np.cumsum([0, *document_lengths[:-1]], dtype=np.int64)[: len(sources)]
            for table in (begins, np.array(sources, np.uint16)):
                digest.update(table.tobytes())
                output.write(table.tobytes())
        sync(partial)
        partial.replace(_data_path(job.path))
    finally:
        partial.unlink(missing_ok=True)
    result.document_lengths = sorted_counts(lengths)
    result.skipped = sorted_counts(counts.skipped)
    result.skipped_places = dict(sorted(counts.places.items()))
    result.normalised = sorted_counts(counts.normalised)
    result.truncated = {name: list(sizes) for name, sizes in counts.truncated.items()}
    info = {"request": job.request, "sha256": digest.hexdigest(), "counts": asdict(result)}
    write_atomically(_info_path(job.path), json.dumps(info).encode())
    return result


def find(job: TokenJob) -> SplitCounts | None:
    """Return the counts of a token file that is there, belongs to this job and has its SHA-256; else None."""
    try:
        info = json.loads(_info_path(job.path).read_bytes())
        if info["request"] != job.request:
            return None
        digest = hashlib.sha256()
        with _data_path(job.path).open("rb") as data:
            while block := data.read(READ_BYTES):
                digest.update(block)
        return SplitCounts.from_json(info["counts"]) if digest.hexdigest() == info["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_segments(segments: list[Segment]) -> tuple[NDArray[np.unsignedinteger], NDArray[np.int64], NDArray[np.uint16]]:
    """Return tokens, document begins and sources of segments laid end to end, as `mesatron_data.pack.cut` takes
    them."""
    tokens, begins, sources = [], [], []
    position = 0
    for segment in segments:
        path = _data_path(segment.path)
        dtype = np.dtype(segment.token_dtype)
        table = segment.tokens * dtype.itemsize
        all_begins = np.fromfile(path, np.int64, segment.documents, offset=table)
        all_sources = np.fromfile(path, np.uint16, segment.documents, offset=table + all_begins.nbytes)
        low = int(np.searchsorted(all_begins, segment.begin, side="right")) - 1
        high = int(np.searchsorted(all_begins, segment.end, side="left"))
        tokens.append(np.fromfile(path, dtype, segment.end - segment.begin, offset=segment.begin * dtype.itemsize))
        begins.append(all_begins[low:high] - segment.begin + position)
        sources.append(np.array(segment.sources, np.uint16)[all_sources[low:high]])
        position += segment.end - segment.begin
    return np.concatenate(tokens), np.concatenate(begins), np.concatenate(sources)


def _data_path(path: Path) -> Path:
    return path.with_name(path.name + ".tokens")


def _info_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path, expected_sha256: str) -> Tokenizer:
    tokenizer = Tokenizer.load(path)
    if tokenizer.sha256 != expected_sha256:
        raise DataError(f"The tokenizer {path} has changed while data were prepared with it: start again.")
    return tokenizer


def _encode(file: InputFile, tokenizer: Tokenizer, counts: Counts) -> Iterator[tuple[Document, list[int]]]:
    """Yield the documents of one file with their ids, tokenized in groups."""
    group: list[Document] = []
    characters = 0
    for document in read_documents(file, counts):
        group.append(document)
        characters += len(document.text)
        if characters >= ENCODE_CHARACTERS:
            yield from zip(group, tokenizer.encode_batch([member.text for member in group]), strict=True)
            group, characters = [], 0
    yield from zip(group, tokenizer.encode_batch([member.text for member in group]), strict=True)
