"""Shards of packed samples in MosaicML's MDS format: written one at a time, described by a split's index.json, read
back."""

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any

import zstandard

from mesatron_data.choice import Segment, read_chosen
from mesatron_data.errors import DataError
from mesatron_data.files import sync, write_atomically
from mesatron_data.manifest import Manifest, load_manifest, read_json
from mesatron_data.pack import Sample, best_fit, cut, padding, pieces_of
from mesatron_data.records import SPLITS
from mesatron_data.store import is_remote, normal, read_bytes, upload

INDEX_FILE = "index.json"
COMPRESSION = "zstd:7"
HASHES = ["sha1", "xxh64"]


@dataclass(frozen=True)
class ShardJob:
    """Shard `number` of a split: the samples of `segments`, to be written into `folder` (local path or URL); what
    became of it goes to `notes`."""

    folder: str
    notes: Path
    number: int
    segments: list[Segment]
    token_dtype: str
    context_length: int
    packing: str
    bos_id: int


@dataclass(frozen=True)
class WrittenShard:
    """A shard's description for index.json, and what its packing cost (see SplitCounts)."""

    shard: dict[str, Any]
    padding_tokens: int = 0
    cuts: int = 0


def columns(token_dtype: str, context_length: int) -> dict[str, str]:
    """Return how the fields of a Sample are stored."""
    return {
        "tokens": f"ndarray:{token_dtype}:{context_length + 1}",
        "document_starts": "ndarray:int32",
        "sources": "ndarray:uint16",
    }


def write_shard(job: ShardJob) -> WrittenShard | None:
    """Write a shard unless its note says that it is written; None when no document begins where it would be.

    A note outlives its shard where the shards have been given the name of the output and the folder of notes was still
    to be removed, so a local shard is looked for; a store's are, all at once, before the manifest is written.
    """
    from mesatron_data.mosaic import streaming

    note = job.notes / f"{job.number:05}.json"
    if note.exists():
        known = WrittenShard(**json.loads(note.read_bytes()))
        stored = known.shard["zip_data"]
        place = Path(job.folder, stored["basename"])
        if is_remote(job.folder) or (place.exists() and place.stat().st_size == stored["bytes"]):
            return known
    documents = read_chosen(job.segments)
    if not len(documents.tokens):
        return None
    work = job.notes / f"{job.number:05}"
    shutil.rmtree(work, ignore_errors=True)
    writer = streaming.MDSWriter(
        columns=columns(job.token_dtype, job.context_length), out=str(work), compression=COMPRESSION, hashes=HASHES,
        size_limit=None,
    )  # fmt: skip
    padding_tokens = cuts = 0
    try:
        if job.packing == "best_fit":
            pieces = pieces_of(documents, job.context_length)
            cuts = len(pieces) - len(documents.begins)
            for sample in best_fit(documents, pieces, job.context_length, job.bos_id):
                padding_tokens += padding(sample, job.bos_id)
                writer.write(vars(sample))
        else:
            for sample in cut(documents, job.context_length):
                cuts += int(sample.tokens[0]) != job.bos_id
                writer.write(vars(sample))
        writer.finish()
    finally:
        writer.cancel_future_jobs()
    (shard,) = read_json(str(work), INDEX_FILE)["shards"]
    written = work / shard["zip_data"]["basename"]
    for part in ("raw_data", "zip_data"):
        shard[part]["basename"] = shard[part]["basename"].replace("00000", f"{job.number:05}")
    name = shard["zip_data"]["basename"]
    if is_remote(job.folder):
        upload(written, f"{job.folder}/{name}")
    else:
        sync(written)
        written.replace(Path(job.folder, name))
        sync(Path(job.folder))
    result = WrittenShard(dict(shard), padding_tokens, cuts)
    write_atomically(note, json.dumps(asdict(result)).encode())
    shutil.rmtree(work)
    return result


def index_of(shards: list[dict[str, Any]]) -> bytes:
    """Return a split's index.json in the form of streaming's own writer."""
    return json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode()


def shard_files(folder: str | Path, manifest: Manifest) -> dict[str, list[dict[str, Any]]]:
    """Return the shard descriptions of each split's index.json (keys used: samples, raw_data and zip_data with
    basename, bytes, hashes).

    Raises DataError when an index is missing or is not the one that `prepare` wrote with this manifest.
    """
    listed: dict[str, list[dict[str, Any]]] = {}
    for split in SPLITS:
        name = f"{split}/{INDEX_FILE}"
        shards = read_json(str(folder), name, manifest.index_sha256.get(split)).get("shards")
        if not isinstance(shards, list) or not all(_is_ours(shard, manifest) for shard in shards):
            raise DataError(
                f"{folder}/{name} is damaged, or was not written by `mesatron data prepare`: prepare again with "
                "--overwrite."
            )
        listed[split] = shards
    indexes = {split: {"shards": shards} for split, shards in listed.items()}
    if manifest.content_fingerprint(indexes) != manifest.fingerprint:
        raise DataError(f"The shards listed in {folder} are not those of its manifest: prepare again with --overwrite.")
    return listed


def _is_ours(shard: Any, manifest: Manifest) -> bool:
    """Whether a shard's description is such as `write_shard` returns for these data."""
    import numpy as np

    try:
        fields = sorted(columns(manifest.token_dtype, manifest.context_length).items())
        common = {
            "column_names": [name for name, _ in fields],
            "column_encodings": [encoding for _, encoding in fields],
            "column_sizes": [None, None, (manifest.context_length + 1) * np.dtype(manifest.token_dtype).itemsize],
            "compression": COMPRESSION, "format": "mds", "hashes": HASHES, "version": 2,
        }  # fmt: skip
        own = {"raw_data", "samples", "size_limit", "zip_data"}
        return (
            shard == common | {key: shard[key] for key in own}
            and all(shard[part].keys() == {"basename", "bytes", "hashes"} for part in ("raw_data", "zip_data"))
            and all(shard[part]["hashes"].keys() == set(HASHES) for part in ("raw_data", "zip_data"))
        )
    except (AttributeError, KeyError, TypeError):
        return False


def decode_shard(shard: dict[str, Any], raw: bytes, first: int = 0, step: int = 1) -> Iterator[Sample]:
    """Yield the samples of one shard, given its description and its uncompressed bytes; from sample `first` on every
    `step`-th."""
    import numpy as np

    from mesatron_data.mosaic import streaming

    reader = streaming.base.format.reader_from_json("", "", shard)
    offsets = np.frombuffer(raw, np.uint32, count=shard["samples"] + 1, offset=4)
    for begin, end in itertools.islice(itertools.pairwise(offsets), first, None, step):
        yield Sample(**reader.decode_sample(raw[begin:end]))


def read_samples(
    folder: str | Path, split: str, most_samples: float = inf, most_shards: float = inf
) -> Iterator[Sample]:
    """Yield the stored samples of a prepared folder (local path or URL) in order: every one, or no more than
    `most_samples`, evenly spread over no more than `most_shards`, which are evenly spread too."""
    shards = shard_files(folder, load_manifest(str(folder)))[split]
    shards = shards[:: max(1, ceil(len(shards) / most_shards))]
    step = max(1, ceil(sum(shard["samples"] for shard in shards) / most_samples))
    position = 0
    for shard in shards:
        path = f"{normal(folder)}/{split}/{shard['zip_data']['basename']}"
        try:
            raw = zstandard.ZstdDecompressor().decompress(read_bytes(path), shard["raw_data"]["bytes"])
        except (zstandard.ZstdError, OSError) as error:
            raise DataError(
                f"Shard {path} cannot be read ({' '.join(str(error).split())}): restore it or prepare again with "
                "--overwrite."
            ) from error
        yield from decode_shard(shard, raw, -position % step, step)
        position += shard["samples"]
