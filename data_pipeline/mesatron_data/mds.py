"""Shards of packed samples in MosaicML's MDS format: written one at a time, described by a split's index.json, read
back."""

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from mesatron_data.errors import DataError
from mesatron_data.files import sync, write_atomically
from mesatron_data.manifest import read_json
from mesatron_data.pack import Sample, cut
from mesatron_data.tokens import Segment, read_segments

INDEX_FILE = "index.json"
COMPRESSION = "zstd:7"
HASHES = ["sha1", "xxh64"]


@dataclass(frozen=True)
class ShardJob:
    """Shard `number` of a split: the samples of `segments`, to be written into `folder`; its description goes to
    `notes`."""

    folder: Path
    notes: Path
    number: int
    segments: list[Segment]
    context_length: int


def columns(token_dtype: str, context_length: int) -> dict[str, str]:
    """Return how the fields of a Sample are stored."""
    return {
        "tokens": f"ndarray:{token_dtype}:{context_length + 1}",
        "document_starts": "ndarray:int32",
        "sources": "ndarray:uint16",
    }


def write_shard(job: ShardJob) -> dict[str, Any]:
    """Return the description of a shard, writing it unless its description is there already."""
    from mesatron_data.mosaic import streaming

    note = job.notes / f"{job.number:05}.json"
    if note.exists():
        known: dict[str, Any] = json.loads(note.read_bytes())
        return known
    work = job.notes / f"{job.number:05}"
    shutil.rmtree(work, ignore_errors=True)
    dtype = job.segments[0].token_dtype
    writer = streaming.MDSWriter(
        columns=columns(dtype, job.context_length), out=str(work), compression=COMPRESSION, hashes=HASHES,
        size_limit=None,
    )  # fmt: skip
    try:
        for sample in cut(*read_segments(job.segments), job.context_length):
            writer.write(vars(sample))
        writer.finish()
    finally:
        writer.cancel_future_jobs()
    (shard,) = read_json(str(work), INDEX_FILE)["shards"]
    written = work / shard["zip_data"]["basename"]
    for part in ("raw_data", "zip_data"):
        shard[part]["basename"] = shard[part]["basename"].replace("00000", f"{job.number:05}")
    sync(written)
    written.replace(job.folder / shard["zip_data"]["basename"])
    sync(job.folder)
    write_atomically(note, json.dumps(shard).encode())
    shutil.rmtree(work)
    return dict(shard)


def write_index(folder: Path, shards: list[dict[str, Any]]) -> None:
    """Write a split's index.json in the form of streaming's own writer."""
    write_atomically(folder / INDEX_FILE, json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode())


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
