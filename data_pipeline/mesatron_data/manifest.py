"""The description of a prepared data folder, manifest.json, and its fingerprint.

A prepared folder holds manifest.json, the tokenizer, and for train and validation a folder of MDS shards with
index.json. Beside them may lie unpacked/ with what training has unpacked.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from mesatron_data.errors import DataError
from mesatron_data.files import cannot_read, sha256
from mesatron_data.records import PLACES_KEPT, SPLITS
from mesatron_data.store import normal, read_bytes

MANIFEST_FILE = "manifest.json"
UNPACKED_FOLDER = "unpacked"
FORMAT_VERSION = 1
MAX_SOURCES = 1 << 15
"""Source numbers are int16 in a batch."""


@dataclass
class SourceCounts:
    """Counts of one source in one split; `tokens` include one BOS a document, `bytes` are UTF-8 bytes of text."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass
class SplitCounts:
    """What one split holds. `document_lengths` counts documents by the smallest power of two that is no less than
    their tokens, `truncated` names files that ended early, with the bytes read and had.

    duplicates      documents whose text came before, in this split or in train, whether or not they were removed
    removed         documents left out by cleaning, by reason; the counts of documents and tokens are without them
    padding_tokens  that fill up samples; cuts: places where a sample goes on with a document that another began
    source_samples  where samples were packed by source: how many of each, in the order of their ids
    """

    samples: int = 0
    dropped_tail_tokens: int = 0
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    document_lengths: dict[int, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_places: dict[str, list[str]] = field(default_factory=dict)
    normalised: dict[str, int] = field(default_factory=dict)
    truncated: dict[str, list[int]] = field(default_factory=dict)
    duplicates: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    padding_tokens: int = 0
    cuts: int = 0
    source_samples: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "SplitCounts":
        """Return the counts that `dataclasses.asdict` and JSON made `value` of."""
        sources = {source: SourceCounts(**counts) for source, counts in value["sources"].items()}
        lengths = {int(length): count for length, count in value["document_lengths"].items()}
        return cls(**value | {"sources": sources, "document_lengths": lengths})

    def add(self, other: "SplitCounts") -> None:
        """Add the counts of a part of the split that comes later in its order."""
        for source, counts in other.sources.items():
            total = self.sources.setdefault(source, SourceCounts())
            total.documents += counts.documents
            total.tokens += counts.tokens
            total.bytes += counts.bytes
        for name in ("document_lengths", "skipped", "normalised", "removed"):
            setattr(self, name, sorted_counts(Counter(getattr(self, name)) + Counter(getattr(other, name))))
        for reason, places in other.skipped_places.items():
            self.skipped_places[reason] = (self.skipped_places.get(reason, []) + places)[:PLACES_KEPT]
        self.skipped_places = dict(sorted(self.skipped_places.items()))
        self.truncated |= other.truncated
        self.duplicates += other.duplicates

    @property
    def documents(self) -> int:
        return sum(source.documents for source in self.sources.values())

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources.values())


@dataclass
class Manifest:
    """A prepared data folder. `sources` are the names that the shards' source numbers stand for; `request` identifies
    the input files and settings it was made from; `fingerprint` identifies the content (equal content, equal
    fingerprint, on any machine); `index_sha256` is that of each split's index.json, which folders prepared by older
    versions lack."""

    tokenizer_sha256: str
    vocabulary_size: int
    bos_id: int
    context_length: int
    token_dtype: str
    sources: list[str]
    splits: dict[str, SplitCounts]
    request: str
    fingerprint: str = ""
    format_version: int = FORMAT_VERSION
    packing: str = "concatenate"
    tokenizer_file: str = "tokenizer.model"
    index_sha256: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the content of manifest.json, which ends with a hash of itself."""
        content = asdict(self)
        return json.dumps(content | {"sha256": _hash(content)}, indent=2).encode() + b"\n"

    @property
    def unpacked_name(self) -> str:
        """The folder of this content's unpacked shards among those of others."""
        return self.fingerprint[:16]

    def content_fingerprint(self, indexes: dict[str, dict[str, Any]]) -> str:
        """Return the SHA-256 over everything that decides the samples, given each split's index.json.

        Shards count by the hash of their uncompressed bytes, so another version of the compressor changes nothing.
        """
        shards = {
            split: [
                (shard["samples"], shard["raw_data"]["bytes"], shard["raw_data"]["hashes"]["sha1"])
                for shard in index["shards"]
            ]
            for split, index in indexes.items()
        }
        content = [
            self.format_version,
            self.tokenizer_sha256,
            self.vocabulary_size,
            self.bos_id,
            self.context_length,
            self.token_dtype,
            self.sources,
            shards,
        ]
        by_source = {name: split.source_samples for name, split in self.splits.items() if split.source_samples}
        if by_source:
            content.append([[name, list(counts.items())] for name, counts in sorted(by_source.items())])
        return sha256(json.dumps(content, sort_keys=True).encode())


def read_file(folder: str, name: str) -> bytes:
    """Read a file of a prepared folder (local path or URL). Raises DataError when it is missing or cannot be read."""
    try:
        return read_bytes(f"{normal(folder)}/{name}")
    except FileNotFoundError as error:
        raise DataError(
            f"No {name} in {folder}: prepare the data with `mesatron data prepare`, or correct the path."
        ) from error
    except OSError as error:
        raise cannot_read(f"{folder}/{name}", error, "check the path and its permissions") from error


def read_json(folder: str, name: str, expected_sha256: str | None = None) -> dict[str, Any]:
    """Read a JSON object of a prepared folder. Raises DataError when it is missing, damaged or not the one expected."""
    content = read_file(folder, name)
    found = sha256(content)
    if expected_sha256 not in (None, found):
        raise DataError(
            f"{folder}/{name} is not that of its manifest (SHA-256 {found}, expected {expected_sha256}): restore it or "
            "prepare again with --overwrite."
        )
    try:
        value = json.loads(content)
    except ValueError as error:
        raise DataError(f"{folder}/{name} is damaged ({error}): prepare again with --overwrite.") from error
    if not isinstance(value, dict):
        raise DataError(f"{folder}/{name} is damaged (no JSON object): prepare again with --overwrite.")
    return value


def load_manifest(folder: str) -> Manifest:
    """Load the manifest of a prepared folder. Raises DataError when there is none or this version cannot read it."""
    value = read_json(folder, MANIFEST_FILE)
    if value.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{folder}/{MANIFEST_FILE} has format {value.get('format_version')}, but this version reads "
            f"format {FORMAT_VERSION}: prepare again."
        )
    expected = value.pop("sha256", None)
    if expected not in (None, _hash(value)):
        raise DataError(
            f"{folder}/{MANIFEST_FILE} is damaged (SHA-256 {_hash(value)}, expected {expected}): prepare again with "
            "--overwrite."
        )
    try:
        splits = {name: SplitCounts.from_json(value["splits"][name]) for name in SPLITS}
        return Manifest(**value | {"splits": splits})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{folder}/{MANIFEST_FILE} is damaged ({error}): prepare again with --overwrite.") from error


def check_sources(number: int, where: str) -> None:
    """Raise DataError for more sources than there are numbers for."""
    if number > MAX_SOURCES:
        raise DataError(
            f"The records of {where} name more than {MAX_SOURCES:,} sources (meta.redpajama_set_name): give them fewer "
            "names."
        )


def _hash(content: dict[str, Any]) -> str:
    """The SHA-256 of what manifest.json holds, the same before it is written and after it is read."""
    return sha256(json.dumps(content).encode())


def length_class(tokens: int) -> int:
    """Return the smallest power of two that is no less than `tokens` (at least 1)."""
    return 1 << (tokens - 1).bit_length()


def sorted_counts(counts: Counter[Any]) -> dict[Any, int]:
    """Return the counts as a plain dictionary in key order, so that equal counts give equal JSON."""
    return dict(sorted(counts.items()))
