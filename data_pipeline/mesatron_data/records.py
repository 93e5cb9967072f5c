"""Read documents from text records in SlimPajama's form.

A record is one line `{"text": ..., "meta": {"redpajama_set_name": ...}}` of a `.jsonl`, `.jsonl.gz` or `.jsonl.zst`
file under FOLDER/train or FOLDER/validation. Lines end at a line feed only, so U+2028 and a lone carriage return stay
part of the text.

The text is left as it is, with two counted exceptions: a byte order mark at the start of a file is removed, and lone
surrogates (a JSON escape can hold one, UTF-8 cannot) become U+FFFD. (A tokenizer that is not ours may change more:
documents that do not come back from it as they were are counted as text_changed_by_tokenizer.) A record that cannot be
used is skipped and counted by reason:

    empty, whitespace_only    the text has no character, or only white space
    no_text                   the line is no JSON object with a string under "text"
    not_json, invalid_utf8    the line cannot be parsed or decoded
    blank_line                the line holds nothing

Compressed data that end early or are damaged lose an unknown number of records: the file is named, with the bytes that
could be read and those it has, and what came before is used only where that is asked for (`check_truncated`).
"""

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsspec
import zstandard

from mesatron_data.errors import DataError
from mesatron_data.files import cannot_read
from mesatron_data.store import is_remote, reaching

SPLITS = ("train", "validation")
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
UNKNOWN_SOURCE = "unknown"
BLOCK_BYTES = 1 << 20
PLACES_KEPT = 5
MAX_WINDOW_BYTES = 1 << 31
"""Of zstandard frames, as of `zstd --long=31`; the library by itself takes no more than 128 MiB."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class InputFile:
    """One file of records. `name` is relative to the input folder; `modified` is the file system's own stamp, ""
    where it has none."""

    url: str
    name: str
    bytes: int
    modified: str


@dataclass(frozen=True)
class Document:
    """One usable record. `file` is the name of its InputFile, `line` counts from 1."""

    text: str
    source: str
    file: str
    line: int


@dataclass
class Counts:
    """What became of the records read: used, skipped by reason with the first places ("file:line"), and characters
    changed by kind; of a truncated file, how many of its bytes were read (to the nearest MiB above) and how many it
    has."""

    documents: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    normalised: Counter[str] = field(default_factory=Counter)
    truncated: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, other: "Counts") -> None:
        """Add those of files that come later."""
        self.documents += other.documents
        self.skipped += other.skipped
        for reason, places in other.places.items():
            self.places[reason] = (self.places.get(reason, []) + places)[:PLACES_KEPT]
        self.normalised += other.normalised
        self.truncated |= other.truncated

    def skip(self, reason: str, file: str, line: int) -> None:
        """Count one skipped record."""
        self.skipped[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES_KEPT:
            places.append(f"{file}:{line}")


class _Truncated(DataError):
    """The compressed data ended early or are damaged; `bytes_read` of them had been read by then."""

    def __init__(self, bytes_read: int) -> None:
        self.bytes_read = bytes_read


def list_files(folder: str, split: str) -> list[InputFile]:
    """Return the record files under `folder`/`split`, sorted by name; `folder` is a local path or an fsspec URL.

    Links to folders and files count as what they name. Raises DataError when the folder is missing, cannot be read or
    holds no record file, and for a link that leads nowhere or in a circle.
    """
    with reaching(folder):
        system, root = fsspec.core.url_to_fs(folder)
        base = f"{root.rstrip('/')}/{split}"
        if not system.isdir(base):
            raise DataError(
                f"No folder {folder}/{split}: the input folder must hold train/ and validation/ with "
                f"{', '.join(SUFFIXES)} files."
            )
        found = system.find(base, detail=True) if is_remote(folder) else dict(_local_files(base, frozenset()))
    files = [
        InputFile(
            url=system.unstrip_protocol(path),
            name=path[len(base) - len(split) :],
            bytes=info["size"],
            modified=str(info.get("mtime") or info.get("LastModified") or info.get("created") or ""),
        )
        for path, info in sorted(found.items())
        if path.endswith(SUFFIXES)
    ]
    if not files:
        raise DataError(f"No {', '.join(SUFFIXES)} file in {folder}/{split}: put the text records there.")
    return files


def _local_files(folder: str, above: frozenset[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what fsspec's find gives of a local folder that lies in the real folders `above`, through links to folders
    too: find takes those for files, and leaves out without a word what it may not read."""
    real = os.path.realpath(folder)
    if real in above:
        raise DataError(f"{folder} is a link to a folder that it lies in: remove the link.")
    try:
        for entry in os.scandir(folder):
            status = entry.stat()
            if entry.is_dir():
                yield from _local_files(entry.path, above | {real})
            else:
                yield entry.path, {"size": status.st_size, "mtime": status.st_mtime}
    except OSError as error:
        raise cannot_read(error.filename, error, "check the path and its permissions") from error


def read_documents(file: InputFile, counts: Counts) -> Iterator[Document]:
    """Yield the usable documents of one file in order and add to `counts`.

    Raises DataError when the file cannot be opened or read.
    """
    try:
        for number, line in enumerate(_lines(file), 1):
            parsed = _parse(line, file.name, number, counts.normalised)
            if isinstance(parsed, str):
                counts.skip(parsed, file.name, number)
            else:
                counts.documents += 1
                yield parsed
    except _Truncated as truncated:
        counts.truncated[file.name] = (truncated.bytes_read, file.bytes)
    except OSError as error:
        raise cannot_read(file.url, error, "check the path and its permissions") from error


def check_skipped(
    documents: int, skipped: Mapping[str, int], places: Mapping[str, list[str]], max_skipped_fraction: float, where: str
) -> None:
    """Raise DataError when no document was usable or more than `max_skipped_fraction` of the records were skipped."""
    lost = sum(skipped.values())
    total = documents + lost
    if documents and lost <= max_skipped_fraction * total:
        return
    reasons = ", ".join(f"{reason} {count} (first at {places[reason][0]})" for reason, count in sorted(skipped.items()))
    raise DataError(
        f"{lost} of {total} records in {where} cannot be used, more than the allowed share of "
        f"{max_skipped_fraction:g}: "
        f"{reasons or 'the files hold no record'}; mend the records or raise the allowed share."
    )


def check_truncated(truncated: Mapping[str, Sequence[int]], allowed: bool) -> None:
    """Raise DataError when files ended early or are damaged, unless that is `allowed`."""
    if not truncated or allowed:
        return
    named = [f"{name} (read {read:,} of {size:,} bytes)" for name, (read, size) in truncated.items()]
    raise DataError(
        f"{len(named)} files end early or are damaged, and how many records that loses is unknown: "
        f"{', '.join(named[:PLACES_KEPT])}{', ...' if len(named) > PLACES_KEPT else ''}; fetch them again, or set "
        "data.allow_truncated_files to use what can be read."
    )


def _parse(line: bytes, file: str, number: int, normalised: Counter[str]) -> Document | str:
    """Return the document of a line, or the reason why there is none."""
    if number == 1 and line.startswith(BYTE_ORDER_MARK):
        line = line.removeprefix(BYTE_ORDER_MARK)
        normalised["byte_order_mark_removed"] += 1
    if not line.strip():
        return "blank_line"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "invalid_utf8"
    except (ValueError, RecursionError):
        return "not_json"
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        return "no_text"
    if not text:
        return "empty"
    if text.isspace():
        return "whitespace_only"
    if not text.isascii():  # known without a look at the characters
        text, replaced = LONE_SURROGATE.subn("\ufffd", text)
        if replaced:
            normalised["lone_surrogate_replaced"] += replaced
    meta = record.get("meta")
    source = meta.get("redpajama_set_name") if isinstance(meta, dict) else None
    if not isinstance(source, str) or not source:
        source = UNKNOWN_SOURCE
    return Document(text, LONE_SURROGATE.sub("\ufffd", source), file, number)


def _lines(file: InputFile) -> Iterator[bytes]:
    """Yield lines without their line feed; the unfinished last line of a truncated file is dropped, for it cannot be
    a whole record."""
    parts: list[bytes] = []
    for block in _blocks(file):
        *ended, rest = block.split(b"\n")
        for line in ended:
            yield b"".join((*parts, line))
            parts.clear()
        parts.append(rest)
    last = b"".join(parts)
    if last:
        yield last


def _blocks(file: InputFile) -> Iterator[bytes]:
    """Yield the decompressed bytes, raising _Truncated where the compressed data end early."""
    if not file.bytes and not file.name.endswith(".jsonl"):
        raise _Truncated(0)  # compressed, even nothing takes some bytes
    with reaching(file.url), fsspec.open(file.url, "rb") as stream:
        if file.name.endswith(".zst"):
            yield from _zstd_blocks(stream)
        elif file.name.endswith(".gz"):
            unpacked = gzip.GzipFile(fileobj=stream)
            try:
                while block := unpacked.read1(BLOCK_BYTES):
                    yield block
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise _Truncated(stream.tell()) from error
        else:
            while block := stream.read(BLOCK_BYTES):
                yield block


def _zstd_blocks(stream) -> Iterator[bytes]:  # type: ignore[no-untyped-def]
    """Decompress any number of zstandard frames. The library's own reader ends quietly inside a frame; this one
    raises _Truncated."""
    unpacker = None
    try:
        while data := stream.read(BLOCK_BYTES):
            while data:
                unpacker = unpacker or zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
                yield unpacker.decompress(data)
                data = b""
                if unpacker.eof:
                    data, unpacker = unpacker.unused_data, None
    except zstandard.ZstdError as error:
        raise _Truncated(stream.tell()) from error
    if unpacker is not None:
        raise _Truncated(stream.tell())
