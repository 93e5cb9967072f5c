"""Write files so that a name never stands for half a content."""

import errno
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesatron_data.errors import DataError, DiskFullError, StorageError

PARTIAL_SUFFIX = ".partial"
FOR_A_PERSON = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG,
    errno.EEXIST, errno.ENOTEMPTY, errno.ENXIO, errno.ENODEV, errno.EXDEV, errno.EINVAL, errno.ENOSYS,
    errno.EOPNOTSUPP, errno.EMSGSIZE, errno.EREMCHG, errno.ENOLCK,
}  # fmt: skip
"""Of an operating system error: another start would meet it again, until somebody has mended what it names."""


def disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no space left: full disk, quota used up, or file size limit reached."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def storage_failed(error: BaseException) -> bool:
    """Whether an error is one that storage may have got over by another start, as EIO, ESTALE or a time-out."""
    if not isinstance(error, OSError) or disk_full(error):
        return False
    if error.errno is None:
        return isinstance(error, TimeoutError | ConnectionError)
    return error.errno not in FOR_A_PERSON


def cannot_read(what: str, error: OSError, advice: str) -> DataError:
    """The fault to report for a file that cannot be read: a StorageError, or else a DataError with `advice`."""
    reason = error.strerror or error
    if storage_failed(error):
        return StorageError(f"Cannot read {what}: {reason}; start the same command again once its storage answers.")
    return DataError(f"Cannot read {what}: {reason}; {advice}.")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an operating system error while writing into `folder` into a DiskFullError, StorageError or DataError."""
    try:
        yield
    except OSError as error:
        if disk_full(error):
            raise DiskFullError(
                f"No space left while writing {folder}: free some space, or choose another output folder."
            ) from error
        kind = StorageError if storage_failed(error) else DataError
        raise kind(
            f"Cannot write {error.filename or folder}: {error.strerror or error}; choose another output folder."
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, flush it to the disk and rename it to `path`."""
    temporary = partial_path(path)
    try:
        temporary.write_bytes(data)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def partial_path(path: Path) -> Path:
    """Return the name under which this thread is to write what becomes `path`: others may be at the same file."""
    writer = f"{threading.get_native_id()}.{os.getpid()}@{os.uname().nodename}"
    return path.with_name(f".{path.name}.{writer}{PARTIAL_SUFFIX}")


def remove_partial(folder: Path) -> None:
    """Remove what processes of this machine that are no more had begun under a `partial_path`."""
    end = f"@{os.uname().nodename}{PARTIAL_SUFFIX}"
    for place, _, names in os.walk(folder):  # goes on where a folder is removed meanwhile
        for name in names:
            process = name.removesuffix(end).rpartition(".")[2]
            if name.endswith(end) and not Path("/proc", process).exists():
                Path(place, name).unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(data: bytes) -> str:
    """Return the SHA-256 of `data` in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def open_lock(path: Path) -> int:
    """Open a file to lock, which is made where there is none, and return its descriptor.

    For writing, without which NFS gives no exclusive lock; for reading where it may not be written.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY)
