"""Durable file operations: after a kill or a power cut a reader finds the old content or the new, never half of it.

Every write goes through `os.write`, `os.pwrite`, `os.fsync` and `os.replace`, which is where the fault-injection tests
cut.
"""

import errno
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mesatron.errors import DiskFullError

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def reporting_full_disk(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn "no space left", "quota exceeded" and "file too large" into a one-line DiskFullError that names `path`.

    Other operating system errors name it too.
    """
    try:
        with naming(path):
            yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        size = f" of {needed_bytes / 1e6:.1f} MB" if needed_bytes is not None else ""
        raise DiskFullError(
            f"No space left to write {path}{size} ({error.strerror}); free some space and start the same command again."
        ) from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let operating system errors from an open file name `path`, as those from opening it do by themselves."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def open_durable(path: Path, shared: bool = False) -> Iterator[int]:
    """Descriptor of a new, empty file at `path`; on a clean exit its content is on the disk.

    shared: keep what other processes may have written into it already.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (0 if shared else os.O_TRUNC), 0o644)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte of `data`: one `os.write` stops at 2 GiB, or earlier on a nearly full disk."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_all_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write every byte of `data` from byte `offset` of the file on."""
    rest = memoryview(data).cast("B")
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a new file and bring its content, not yet its name, to the disk.

    Raises DiskFullError.
    """
    with reporting_full_disk(path), open_durable(path) as descriptor:
        write_all(descriptor, data)


def append_file(path: Path, data: bytes) -> None:
    """Add to the end of a file, which is made if need be, in one write; not yet on the disk when this returns.

    Raises DiskFullError.
    """
    with reporting_full_disk(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            write_all(descriptor, data)
        finally:
            os.close(descriptor)


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Put new content in place of the file at `path` in one step, on the disk when this returns.

    The temporary file beside it is called `.rewriting-` and a number that follows from its name: the name itself could
    make a reader take what a kill leaves for a log. Raises DiskFullError.
    """
    temporary = path.with_name(f".rewriting-{zlib.crc32(path.name.encode()):08x}")
    with reporting_full_disk(path):
        with open_durable(temporary) as descriptor:
            for chunk in chunks:
                write_all(descriptor, chunk)
        os.replace(temporary, path)
        sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Bring a file's content to the disk, whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk; until then a new or renamed file can vanish in a power cut."""
    sync_file(path)
