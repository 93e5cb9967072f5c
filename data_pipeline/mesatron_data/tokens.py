"""Token files: the tokens of one file of records, kept between reading the text and packing samples.

NAME.tokens holds the token stream BOS document BOS document ..., then four tables with a value for each document:
where in the stream it begins (int64), the UTF-8 bytes of its text (int64), the text's hash (uint64) and its source as
a number (uint16). NAME.json, written last, holds its SHA-256 and what became of the records. Both are functions of
records and tokenizer alone, so two processes that make the same one do not disturb each other, and everything that is
decided later (sequence length, packing, cleaning, mixture) takes no second tokenizing.
"""

import functools
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mesatron_data.errors import DataError
from mesatron_data.files import partial_path, sha256, sync, write_atomically
from mesatron_data.manifest import SourceCounts, SplitCounts, check_sources, length_class, sorted_counts
from mesatron_data.records import Counts, Document, InputFile, read_documents
from mesatron_data.tokenizer import Tokenizer

FORMAT_VERSION = 2
ENCODE_CHARACTERS = 1 << 20
READ_BYTES = 1 << 22


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
class Tables:
    """What a token file knows of each document, [documents] each; `lengths` are tokens with BOS."""

    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]
    bytes: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    sources: NDArray[np.uint16]


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
    document_lengths, text_bytes, hashes, sources = array("q"), array("q"), array("Q"), array("H")
    numbers: dict[str, int] = {}
    digest = hashlib.sha256()
    dtype = np.dtype(job.token_dtype)
    bos = np.array(tokenizer.bos_id, dtype).tobytes()
    partial = partial_path(_data_path(job.path))
    try:
        with partial.open("wb") as output:
            for document, ids in _encode(job.file, tokenizer, counts):
                data = bos + array(dtype.char, ids).tobytes()
                digest.update(data)
                output.write(data)
                text = document.text.encode()
                if not tokenizer.lossless and tokenizer.decode(ids) != document.text:
                    counts.normalised["text_changed_by_tokenizer"] += 1
                source = result.sources.setdefault(document.source, SourceCounts())
                source.documents += 1
                source.tokens += len(ids) + 1
                source.bytes += len(text)
                lengths[length_class(len(ids) + 1)] += 1
                document_lengths.append(len(ids) + 1)
                text_bytes.append(len(text))
                hashes.append(xxhash.xxh3_64_intdigest(text))
                sources.append(numbers.setdefault(document.source, len(numbers)))
                check_sources(len(numbers), job.file.name)
            lengths_table = np.array(document_lengths, np.int64)
            begins = lengths_table.cumsum() - lengths_table
            for table in (begins, text_bytes, hashes, sources):
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


def read_tables(path: Path, tokens: int, documents: int, token_dtype: str) -> Tables:
    """Return the tables of a token file that holds so many tokens and documents."""
    position = tokens * np.dtype(token_dtype).itemsize
    tables: list[NDArray[Any]] = []
    for dtype in (np.int64, np.int64, np.uint64, np.uint16):
        tables.append(np.fromfile(_data_path(path), dtype, documents, offset=position))
        position += tables[-1].nbytes
    begins, text_bytes, hashes, sources = tables
    return Tables(begins, np.diff(begins, append=tokens), text_bytes, hashes, sources)


def read_tokens(path: Path, token_dtype: str, begin: int, end: int) -> NDArray[np.unsignedinteger]:
    """Return tokens `begin` to `end` of a token file."""
    dtype = np.dtype(token_dtype)
    return np.fromfile(_data_path(path), dtype, end - begin, offset=begin * dtype.itemsize)


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
