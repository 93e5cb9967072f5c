"""Unpacked shards on the disk of this machine: fetched, checked and unpacked once for all its processes, and removed
again where there is a limit.

Nothing is shared but files. A shard is put in place by renaming, so what has its name is whole; one reader at a time
fetches it, under a lock that ends with the process; the limit holds for all files of a cache folder together, whoever
made them, and counts a file from the moment it is begun.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zstandard

from mesatron_data.errors import DataError, DiskFullError, StorageError
from mesatron_data.files import cannot_read, disk_full, open_lock, storage_failed
from mesatron_data.mosaic import streaming
from mesatron_data.store import read_bytes

HASH = "xxh64"
FAULTS = (DataError, OSError, zstandard.ZstdError)
LOCKS = 64
TOUCH_SECONDS = 2.0
ATTEMPTS = 8
LEFT_SECONDS = 86_400.0
PREPARE_AGAIN = "restore it or prepare again with --overwrite"


class ShardCache:
    """The unpacked shards of one split.

    source        folder of the packed shards, local path or URL
    shards        their descriptions, as `mesatron_data.mds.shard_files` returns them
    cache_folder  where unpacked shards of any content are kept, for any number of runs
    name          of these inside `cache_folder`, CONTENT/SPLIT, so that a run never meets those of other content
    limit_bytes   that the files in `cache_folder` may take; 0 for no limit

    `read` is safe in threads. Attributes: fetched_bytes and fetch_seconds, of packed shards, by this object so far.
    """

    def __init__(
        self, source: str, shards: list[dict[str, Any]], cache_folder: Path, name: str, limit_bytes: int
    ) -> None:
        self._source, self._shards = source, shards
        self._root = cache_folder.absolute()
        self._folder = self._root / name
        self._limit_bytes = limit_bytes
        with self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        self._readers = [streaming.base.format.reader_from_json(str(self._folder), "", shard) for shard in shards]
        self._checked: set[int] = set()
        self._touched: dict[int, float] = {}
        self._counting = threading.Lock()
        self.fetched_bytes = 0
        self.fetch_seconds = 0.0

    def read(self, shard: int, place: int) -> dict[str, Any]:
        """Return the sample at a place of a shard as it was written.

        Raises DataError when the shard is missing or, after a second try, damaged, when the limit makes readers
        remove each other's shards, when the data were replaced and when the folder may not be written; StorageError
        when the second try cannot read it either; DiskFullError without space.
        """
        for _ in range(ATTEMPTS):
            try:
                self._provide(shard)
                sample: dict[str, Any] = self._readers[shard][place]
                return sample
            except FileNotFoundError:  # removed by a reader that needed the space
                self._checked.discard(shard)
        raise DataError(
            f"Shard {self._raw(shard)} was removed {ATTEMPTS} times before it could be read: other runs fill the cache "
            "folder; raise data.cache_limit_bytes or give this run a cache folder of its own."
        )

    def _provide(self, shard: int) -> None:
        """See to it that the unpacked shard is there, was checked by this process, and counts as used now."""
        if shard not in self._checked:
            if not self._folder.exists():
                raise DataError(
                    f"{self._folder} was removed while a run read from it: its data were prepared anew, or the folder "
                    "was cleared; start the run again on the data that it began with."
                )
            if not self._sound(shard):
                with self._writing(shard), _locked(self._root / f".lock-{shard % LOCKS}"):
                    if not self._sound(shard):
                        self._fetch(shard)
            self._checked.add(shard)
        now = time.monotonic()
        if self._limit_bytes and now > self._touched.get(shard, 0.0) + TOUCH_SECONDS:
            with suppress(PermissionError):  # another user's copy
                os.utime(self._raw(shard))
            self._touched[shard] = now

    def _sound(self, shard: int) -> bool:
        """Whether the unpacked shard is there and has its hash."""
        try:
            content = self._raw(shard).read_bytes()
        except OSError:
            return False
        return bool(streaming.base.hashing.get_hash(HASH, content) == self._shards[shard]["raw_data"]["hashes"][HASH])

    def _fetch(self, shard: int) -> None:
        """Fetch, check and unpack a shard; if that fails, once more."""
        try:
            return self._unpack(shard)
        except FAULTS:
            pass
        try:
            self._unpack(shard)
        except DataError:
            raise
        except FAULTS as error:
            packed = self._shards[shard]["zip_data"]["basename"]
            if isinstance(error, OSError):
                raise cannot_read(f"shard {packed} of {self._source}", error, PREPARE_AGAIN) from error
            raise DataError(
                f"Cannot read shard {packed} of {self._source} ({' '.join(str(error).split())}): {PREPARE_AGAIN}."
            ) from error

    def _unpack(self, shard: int) -> None:
        info = self._shards[shard]
        packed = f"{self._source}/{info['zip_data']['basename']}"
        begin = time.perf_counter()
        data = read_bytes(packed)
        with self._counting:
            self.fetched_bytes += len(data)
            self.fetch_seconds += time.perf_counter() - begin
        _check_hash(packed, data, info["zip_data"]["hashes"][HASH])
        content = zstandard.ZstdDecompressor().decompress(data, info["raw_data"]["bytes"])
        raw = self._raw(shard)
        _check_hash(str(raw), content, info["raw_data"]["hashes"][HASH])
        partial = raw.with_name(f".{raw.name}.{os.uname().nodename}-{os.getpid()}-{threading.get_ident()}")
        with self._writing(shard):
            try:
                self._begin(partial, len(content))
                # Without cutting it to nothing first: the limit counts its size.
                with open(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
                    file.write(content)
                partial.replace(raw)
            finally:
                partial.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Remove what killed processes have left half unpacked: at once if they ran here, after a day if elsewhere."""
        for path in self._folder.glob(".*.*-*-*"):
            node, _, numbers = path.name.rpartition("-")[0].rpartition("-")
            with suppress(OSError, ValueError):  # gone meanwhile, another user's, or no such file
                here = node.endswith("." + os.uname().nodename)
                if time.time() - path.stat().st_mtime > LEFT_SECONDS or (here and not _runs(int(numbers))):
                    path.unlink()

    def _begin(self, partial: Path, size: int) -> None:
        """Under a limit, remove the shards that were not used for longest until `size` bytes fit, and take those by a
        file of that size."""
        if not self._limit_bytes:
            return
        with _locked(self._root / ".lock"):
            known = []
            for path in self._root.glob("*/*/*"):
                try:
                    stat = path.stat()
                except FileNotFoundError:
                    continue  # put in place under its own name meanwhile
                known.append((stat.st_mtime_ns, stat.st_size, path))
            total = sum(size for _, size, _ in known)
            for _, freed, path in sorted(known):
                if total + size <= self._limit_bytes:
                    break
                with suppress(PermissionError):  # another user's
                    path.unlink(missing_ok=True)
                    total -= freed
            with partial.open("wb") as file:
                file.truncate(size)

    def _raw(self, shard: int) -> Path:
        return self._folder / self._shards[shard]["raw_data"]["basename"]

    @contextmanager
    def _writing(self, shard: int | None = None) -> Iterator[None]:
        """Turn an operating system error in the folder of unpacked shards into one sentence."""
        try:
            yield
        except OSError as error:
            what = "shards" if shard is None else f"shard {self._shards[shard]['zip_data']['basename']}"
            where = f"{what} into {self._folder}"
            if disk_full(error):
                raise DiskFullError(
                    f"No space left to unpack {where}: free some, or name another folder in data.cache_folder."
                ) from error
            reason = error.strerror or error
            if storage_failed(error):
                raise StorageError(
                    f"Cannot unpack {where}: {reason}; start the same command again once its storage answers."
                ) from error
            raise DataError(
                f"Cannot unpack {where}: {reason}; name a folder that can be written to in data.cache_folder."
            ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on a file, which is made where there is none."""
    lock = open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _check_hash(place: str, content: bytes, expected: str) -> None:
    found = streaming.base.hashing.get_hash(HASH, content)
    if found != expected:
        raise DataError(f"Shard {place} is damaged ({HASH} {found}, expected {expected}): {PREPARE_AGAIN}.")


def _runs(process: int) -> bool:
    """Whether a process of this number runs on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
