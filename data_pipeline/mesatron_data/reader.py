"""Random access to the samples of a prepared split, local or remote, with every byte checked against its hash before
use.

`streaming.StreamingDataset` fetches, checks and unpacks shards and is asked for samples by number. Its own iteration
is not used: it repeats samples to fill up an epoch, differently for different numbers of processes, and ends quietly
or hangs on a damaged shard.
"""

import fcntl
import os
import threading
from pathlib import Path

import torch
import zstandard

from mesatron_data.errors import DataError, DiskFullError
from mesatron_data.files import disk_full
from mesatron_data.manifest import load_manifest
from mesatron_data.mds import shard_files
from mesatron_data.mosaic import streaming
from mesatron_data.pack import Sample
from mesatron_data.records import SPLITS
from mesatron_data.segments import hold, release, remove_stale

HASH = "xxh64"
FAULTS = (DataError, ValueError, OSError, RuntimeError, zstandard.ZstdError)


class SampleReader:
    """One split of a prepared folder. Opening and closing are collective: every process of a torch.distributed group
    does both.

    folder: local path or URL. cache_folder: where unpacked shards are kept, needed for a URL; without it they are kept
    beside the packed ones. Runs may share either.

    Attributes: manifest, samples (how many), samples_per_shard [shards] int64.
    Raises DataError when the folder is no prepared folder, its parts do not fit together, or the launch is half set up.
    """

    def __init__(self, folder: str, split: str, cache_folder: Path | None, timeout_seconds: float) -> None:
        folder = folder.removeprefix("file://").rstrip("/")
        if cache_folder is None and "://" in folder:
            raise DataError(f"{folder} is remote: name a cache folder on this machine for its shards.")
        self._folder = folder
        self.manifest = load_manifest(folder)
        indexes = {name: {"shards": shard_files(folder, name)} for name in SPLITS}
        if self.manifest.content_fingerprint(indexes) != self.manifest.fingerprint:
            raise DataError(
                f"The shards listed in {folder} are not those of its manifest: prepare again with --overwrite."
            )
        self._shards = indexes[split]["shards"]
        self._local = (
            Path(folder).absolute()
            if cache_folder is None
            else cache_folder.absolute() / self.manifest.fingerprint[:16]
        )
        self._cached = cache_folder is not None
        self._split = split
        _check_launch()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            remove_stale(self._local / split)
        if distributed:
            torch.distributed.barrier()
        try:
            self._dataset = streaming.StreamingDataset(
                local=str(self._local),
                remote=None if cache_folder is None else folder,
                split=split,
                validate_hash=HASH,
                download_timeout=timeout_seconds,
            )
        except FAULTS as error:
            raise DataError(
                f"Cannot open {folder}/{split} ({' '.join(str(error).split())}): correct the path, or use "
                "another cache folder."
            ) from error
        self._in_use = hold(self._dataset)
        self.samples_per_shard = self._dataset.samples_per_shard
        self.samples = self._dataset.num_samples
        self._checked: set[int] = set()

    def read(self, sample_id: int) -> Sample:
        """Return one sample, fetching its shard if need be. Safe in threads. Raises DataError when the shard is
        missing or damaged."""
        shard, _ = self._dataset.spanner[sample_id]
        if shard not in self._checked:
            self._check(shard)
            self._checked.add(shard)
        return Sample(**self._dataset.get_item(sample_id))

    def close(self) -> None:
        """Free the shared memory."""
        release(self._dataset, self._in_use)

    def _check(self, shard: int) -> None:
        """Fetch and unpack a shard; if that fails, once more from the start, alone on this host."""
        try:
            return self._fetch(shard)
        except FAULTS:
            pass
        folder = os.open(self._local / self._split, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            try:
                return self._fetch(shard)  # another process may have mended it
            except FAULTS:
                self._remove_copies(shard)
            self._fetch(shard)
        except FAULTS as error:
            packed, _ = self._paths(shard)
            if disk_full(error):
                raise DiskFullError(
                    f"No space left to unpack shard {packed.name} into {self._local}: free some, or use "
                    "another cache folder."
                ) from error
            if packed.exists():
                expected = self._shards[shard]["zip_data"]["hashes"][HASH]
                _check_hash(packed, expected, "restore the shard or prepare again with --overwrite")
            raise DataError(
                f"Cannot read shard {packed.name} of {self._folder}/{self._split} ({' '.join(str(error).split())}): "
                "restore it or prepare again with --overwrite."
            ) from error
        finally:
            os.close(folder)

    def _fetch(self, shard: int) -> None:
        """Fetch and unpack a shard and check the unpacked file too (streaming checks only the packed one)."""
        try:
            self._unpack(shard)
            self._dataset.prepare_shard(shard)
            _check_hash(self._paths(shard)[1], self._shards[shard]["raw_data"]["hashes"][HASH], "remove it")
        except FAULTS:
            # streaming leaves the shard marked as being fetched, and every other reader would wait for it for ever.
            self._dataset._shard_states[shard] = streaming.base.dataset._ShardState.REMOTE
            raise

    def _unpack(self, shard: int) -> None:
        """Unpack a shard that is here already. streaming would do so under one name for all processes, and those of
        other machines that share the folder cannot know of each other."""
        packed, raw = self._paths(shard)
        if raw.exists() or not packed.exists():
            return
        info = self._shards[shard]
        _check_hash(packed, info["zip_data"]["hashes"][HASH], "restore the shard or prepare again with --overwrite")
        content = zstandard.ZstdDecompressor().decompress(packed.read_bytes(), info["raw_data"]["bytes"])
        partial = raw.with_name(f".{raw.name}.{os.uname().nodename}-{os.getpid()}-{threading.get_ident()}")
        try:
            partial.write_bytes(content)
            partial.replace(raw)
        finally:
            partial.unlink(missing_ok=True)

    def _remove_copies(self, shard: int) -> None:
        packed, raw = self._paths(shard)
        raw.unlink(missing_ok=True)
        if self._cached:
            packed.unlink(missing_ok=True)

    def _paths(self, shard: int) -> tuple[Path, Path]:
        folder = self._local / self._split
        info = self._shards[shard]
        return folder / info["zip_data"]["basename"], folder / info["raw_data"]["basename"]


def _check_hash(path: Path, expected: str, remedy: str) -> None:
    found = streaming.base.hashing.get_hash(HASH, path.read_bytes())
    if found != expected:
        raise DataError(f"Shard {path} is damaged ({HASH} {found}, expected {expected}): {remedy}.")


def _check_launch() -> None:
    """streaming takes rank and world size from the environment; refuse where that disagrees with torch.distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    expected = {"RANK": torch.distributed.get_rank(), "WORLD_SIZE": torch.distributed.get_world_size()}
    wrong = [
        name for name, value in expected.items() if os.environ.get(name, "0" if name == "RANK" else "1") != str(value)
    ]
    if expected["WORLD_SIZE"] > 1:
        wrong += [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in os.environ]
    if wrong:
        raise DataError(
            f"The environment's {', '.join(wrong)} missing or at odds with torch.distributed: start with "
            "torchrun or set them per process."
        )
