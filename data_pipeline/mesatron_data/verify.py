"""Check a prepared data folder against its manifest (`mesatron data verify`)."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from mesatron_data.errors import DataError
from mesatron_data.files import cannot_read, sha256, write_atomically
from mesatron_data.manifest import UNPACKED_FOLDER, Manifest, load_manifest, read_file
from mesatron_data.mds import decode_shard, shard_files
from mesatron_data.pack import padding
from mesatron_data.store import is_remote, normal, read_bytes

VERIFIED_FILE = "verified.json"


@dataclass(frozen=True)
class Report:
    """What was checked: shards, samples, and bytes read from the disk; `contents` says whether the samples were
    looked at too."""

    manifest: Manifest
    shards: int
    samples: int
    bytes: int
    contents: bool


def verify(folder: str | Path, contents: bool = True) -> Report:
    """Check that a prepared folder (local path or URL) is whole: fingerprint, tokenizer, each shard's size and SHA-1.

    With `contents`, shards are also unpacked: the SHA-1 of the unpacked bytes, sample counts, token ids and document
    starts are checked. Copies that training has unpacked in the folder are checked as well. Raises DataError
    naming the first fault.
    """
    folder = normal(folder)
    manifest = load_manifest(folder)
    listed = shard_files(folder, manifest)
    if sha256(read_file(folder, manifest.tokenizer_file)) != manifest.tokenizer_sha256:
        raise DataError(
            f"{folder}/{manifest.tokenizer_file} is not the tokenizer the data were made with: restore it or prepare "
            "again with --overwrite."
        )
    shards = samples = size = 0
    for split, described in listed.items():
        found, expected = sum(shard["samples"] for shard in described), manifest.splits[split].samples
        if found != expected:
            raise DataError(
                f"{folder}/{split} lists {found} samples, but the manifest {expected}: prepare again with --overwrite."
            )
        for shard in described:
            here = f"{folder}/{split}"
            packed = _read(here, shard["zip_data"])
            unpacked = f"{folder}/{UNPACKED_FOLDER}/{manifest.unpacked_name}/{split}"
            if not is_remote(folder) and Path(unpacked, shard["raw_data"]["basename"]).exists():
                _read(unpacked, shard["raw_data"])
            if contents:
                _check_contents(here, shard, packed, manifest)
            shards += 1
            samples += shard["samples"]
            size += len(packed)
    return Report(manifest, shards, samples, size, contents)


def verify_once(folder: str | Path) -> None:
    """`verify` the bytes of a local prepared folder unless they were verified before and no file has changed since.

    What was verified is noted in verified.json, by name, size and time of each file; a folder that cannot be written
    to is verified every time. A remote folder is left to the readers, which check each shard as they fetch it.
    """
    if is_remote(normal(folder)):
        return
    folder = Path(normal(folder))
    note = folder / VERIFIED_FILE
    found = _file_facts(folder)
    try:
        known = json.loads(note.read_bytes())
    except (OSError, ValueError):
        known = None
    if known == found:
        return
    verify(folder, contents=False)
    with suppress(OSError):
        write_atomically(note, json.dumps(found).encode())


def _file_facts(folder: Path) -> dict[str, list[int]]:
    """Size and time of every packed shard, index and description."""
    files = [path for pattern in ("*", "*/*.zstd", "*/index.json") for path in sorted(folder.glob(pattern))]
    facts = {str(path.relative_to(folder)): path.stat() for path in files if path.is_file()}
    facts.pop(VERIFIED_FILE, None)
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in facts.items()}


def _read(folder: str, expected: dict[str, Any]) -> bytes:
    """Read a file and compare its size and SHA-1 with those expected."""
    place = f"{folder}/{expected['basename']}"
    try:
        data = read_bytes(place)
    except OSError as error:
        raise cannot_read(f"shard {place}", error, "restore it or prepare again with --overwrite") from error
    _check_bytes(place, data, expected)
    return data


def _check_bytes(place: str, data: bytes, expected: dict[str, Any]) -> None:
    if len(data) != expected["bytes"]:
        raise DataError(
            f"Shard {place} has {len(data)} bytes, expected {expected['bytes']}: restore it or prepare again with "
            "--overwrite."
        )
    found = hashlib.sha1(data).hexdigest()
    if found != expected["hashes"]["sha1"]:
        raise DataError(
            f"Shard {place} is damaged (SHA-1 {found}, expected {expected['hashes']['sha1']}): restore it or "
            "prepare again with --overwrite."
        )


def _check_contents(folder: str, shard: dict[str, Any], packed: bytes, manifest: Manifest) -> None:
    raw = zstandard.ZstdDecompressor().decompress(packed, shard["raw_data"]["bytes"])
    _check_bytes(f"{folder}/{shard['raw_data']['basename']}", raw, shard["raw_data"])
    for number, sample in enumerate(decode_shard(shard, raw)):
        where = f"sample {number} of shard {folder}/{shard['zip_data']['basename']}"
        if len(sample.tokens) != manifest.context_length + 1:
            raise DataError(
                f"{where} has {len(sample.tokens)} tokens, expected {manifest.context_length + 1}: prepare "
                "the data again."
            )
        if int(sample.tokens.max()) >= manifest.vocabulary_size:
            raise DataError(
                f"{where} has token {int(sample.tokens.max())}, but the vocabulary ends at "
                f"{manifest.vocabulary_size - 1}: prepare again with --overwrite."
            )
        unused = padding(sample, manifest.bos_id) if manifest.packing == "best_fit" else 0
        starts = int((sample.tokens[sample.document_starts] == manifest.bos_id).sum()) + max(unused - 1, 0)
        if starts != int((sample.tokens == manifest.bos_id).sum()) or int(sample.sources.max()) >= len(
            manifest.sources
        ):
            raise DataError(
                f"{where} has document starts or sources that do not fit its tokens: prepare again with --overwrite."
            )
