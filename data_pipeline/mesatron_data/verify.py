"""Check a prepared data folder against its manifest (`mesatron data verify`).

Packed shards that were found sound are noted in the folder's verified.json, each with its size, the time of its last
change (which a copy does not share) and its SHA-1, so that runs need not read them again. A folder that cannot be
written to has no such note.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from mesatron_data.errors import DataError
from mesatron_data.files import cannot_read, remove_partial, sha256, write_atomically
from mesatron_data.manifest import UNPACKED_FOLDER, Manifest, load_manifest, read_file
from mesatron_data.mds import decode_shard, shard_files
from mesatron_data.pack import padding
from mesatron_data.store import is_remote, normal, read_bytes

VERIFIED_FILE = "verified.json"
NOTE_SECONDS = 30.0
"""Between two notes of a verification: so much of it is done again after a kill."""
RESTORE = "restore it or prepare again with --overwrite"
Facts = dict[str, list[int | str]]


@dataclass(frozen=True)
class Report:
    """What was checked: shards, samples, and bytes read from the disk."""

    manifest: Manifest
    shards: int
    samples: int
    bytes: int


def verify(folder: str | Path) -> Report:
    """Check that a prepared folder (local path or URL) is whole: fingerprint, tokenizer, each shard's size and SHA-1,
    packed and unpacked, sample counts, token ids and document starts.

    Copies that training has unpacked in the folder are checked as well. Raises DataError naming the first fault.
    """
    folder = normal(folder)
    manifest, listed = _listed(folder)
    facts = _facts(folder, listed)
    samples = size = 0
    for split, shard in listed:
        here, unpacked = f"{folder}/{split}", f"{folder}/{UNPACKED_FOLDER}/{manifest.unpacked_name}/{split}"
        packed = _read(here, shard["zip_data"])
        if not is_remote(folder) and Path(unpacked, shard["raw_data"]["basename"]).exists():
            _read(unpacked, shard["raw_data"])
        _check_contents(here, shard, packed, manifest)
        samples += shard["samples"]
        size += len(packed)
    if not is_remote(folder):
        _note(folder, facts)
    return Report(manifest, len(listed), samples, size)


def verify_once(folder: str | Path, alive: Callable[[], None] = lambda: None) -> None:
    """Check that a local prepared folder is whole, but no bytes of shards that are noted as sound; calls `alive` after
    each shard that it reads.

    A verification that is killed is gone on with by the next. A remote folder is left to the readers, which check each
    shard as they fetch it. Raises DataError naming the first fault.
    """
    folder = normal(folder)
    if is_remote(folder):
        return
    _, listed = _listed(folder)
    facts, noted = _facts(folder, listed), _noted(folder)
    sound = {name: fact for name, fact in facts.items() if noted.get(name) == fact}
    last_note = time.monotonic()
    for split, shard in listed:
        name = _name(split, shard)
        if name in sound:
            continue
        _read(f"{folder}/{split}", shard["zip_data"])
        sound[name] = facts[name]
        alive()
        if time.monotonic() >= last_note + NOTE_SECONDS:
            _note(folder, sound)
            last_note = time.monotonic()
    if sound != noted:
        _note(folder, sound)


def note_sound(folder: str | Path) -> None:
    """Note all shards of a prepared folder as sound, which were just written; a remote one has no note."""
    folder = normal(folder)
    if not is_remote(folder):
        _note(folder, _facts(folder, _listed(folder)[1]))


def _listed(folder: str) -> tuple[Manifest, list[tuple[str, dict[str, Any]]]]:
    """The manifest, and the split and description of each shard, after all files but the shards were checked."""
    manifest = load_manifest(folder)
    listed = shard_files(folder, manifest)
    if sha256(read_file(folder, manifest.tokenizer_file)) != manifest.tokenizer_sha256:
        raise DataError(f"{folder}/{manifest.tokenizer_file} is not the tokenizer the data were made with: {RESTORE}.")
    for split, shards in listed.items():
        found, expected = sum(shard["samples"] for shard in shards), manifest.splits[split].samples
        if found != expected:
            raise DataError(
                f"{folder}/{split} lists {found} samples, but the manifest {expected}: prepare again with --overwrite."
            )
    return manifest, [(split, shard) for split, shards in listed.items() for shard in shards]


def _name(split: str, shard: dict[str, Any]) -> str:
    return f"{split}/{shard['zip_data']['basename']}"


def _facts(folder: str, listed: list[tuple[str, dict[str, Any]]]) -> Facts:
    """What tells whether a packed shard is still the one that was read, by name; of a remote folder nothing."""
    facts: Facts = {}
    for split, shard in listed if not is_remote(folder) else ():
        name = _name(split, shard)
        try:
            stat = Path(folder, name).stat()
        except OSError as error:
            raise cannot_read(f"shard {folder}/{name}", error, RESTORE) from error
        facts[name] = [stat.st_size, stat.st_ctime_ns, shard["zip_data"]["hashes"]["sha1"]]
    return facts


def _noted(folder: str) -> Facts:
    try:
        noted = json.loads(Path(folder, VERIFIED_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _note(folder: str, sound: Facts) -> None:
    with suppress(OSError):
        remove_partial(Path(folder))
        write_atomically(Path(folder, VERIFIED_FILE), json.dumps(sound).encode())


def _read(folder: str, expected: dict[str, Any]) -> bytes:
    """Read a file and compare its size and SHA-1 with those expected."""
    place = f"{folder}/{expected['basename']}"
    try:
        data = read_bytes(place)
    except OSError as error:
        raise cannot_read(f"shard {place}", error, RESTORE) from error
    _check_bytes(place, data, expected)
    return data


def _check_bytes(place: str, data: bytes, expected: dict[str, Any]) -> None:
    if len(data) != expected["bytes"]:
        raise DataError(f"Shard {place} has {len(data)} bytes, expected {expected['bytes']}: {RESTORE}.")
    found = hashlib.sha1(data).hexdigest()
    if found != expected["hashes"]["sha1"]:
        raise DataError(f"Shard {place} is damaged (SHA-1 {found}, expected {expected['hashes']['sha1']}): {RESTORE}.")


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
