"""Write files so that a name never stands for half a content."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesatron_data.errors import DataError, DiskFullError


def disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no space left: full disk, quota used up, or file size limit reached."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an operating system error while writing into `folder` into a DiskFullError or a DataError."""
    try:
        yield
    except OSError as error:
        if disk_full(error):
            raise DiskFullError(
                f"No space left while writing {folder}: free some space, or choose another output folder."
            ) from error
        raise DataError(
            f"Cannot write {error.filename or folder}: {error.strerror or error}; choose another output folder."
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name, flush it to the disk and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_bytes(data)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


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
