"""Files in local folders and in object stores, by path or by URL (s3://..., any scheme that fsspec knows).

Credentials and endpoints come from where the store's own library looks for them (for s3: AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, ~/.aws/...).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from mesatron_data.errors import DataError, StorageError
from mesatron_data.files import disk_full, storage_failed

STATUS = ("status", "status_code", "code")
"""Attributes in which the libraries' errors keep a status of HTTP."""
UNREACHABLE = {
    "ConnectionError", "HTTPClientError", "ClientConnectionError", "ClientPayloadError", "ServiceRequestError",
    "ServiceResponseError", "TimeoutError",
}  # fmt: skip
"""Names of the classes of errors by which Python, botocore, aiohttp, requests and Azure's library say that a store
could not be reached, or that a connection to it broke."""


def is_remote(folder: str) -> bool:
    """Whether `folder` is the URL of an object store."""
    return "://" in folder and not folder.startswith("file://")


def normal(folder: str | Path) -> str:
    """Return a folder as the other functions take it: without a slash at its end, a local one without file://."""
    return str(folder).removeprefix("file://").rstrip("/") or "/"


@contextmanager
def reaching(place: str) -> Iterator[None]:
    """Turn what a store's library raises about `place` into a DataError of one sentence, a StorageError if another
    start may fare better; a missing file stays FileNotFoundError, so that callers can say what it means, and a full
    disk an OSError."""
    try:
        yield
    except (DataError, FileNotFoundError):
        raise
    except Exception as error:  # each store's library has errors of its own
        if disk_full(error) or (isinstance(error, OSError) and not is_remote(place)):
            raise
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        kind = StorageError if _may_pass(error) else DataError
        raise kind(f"Cannot reach {place} ({reason}); check the URL, credentials and network.") from error


def _may_pass(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised for, says that the store was out of reach or failed on its side."""
    while error is not None:
        status = next((value for name in STATUS if isinstance(value := getattr(error, name, None), int)), 0)
        known = {kind.__name__ for kind in type(error).__mro__} & UNREACHABLE
        if storage_failed(error) or known or status >= 500:
            return True
        error = error.__cause__ or error.__context__
    return False


def read_bytes(place: str) -> bytes:
    """Return the content of a file. Raises FileNotFoundError, another OSError for a local file, or DataError."""
    with reaching(place):
        if not is_remote(place):
            return Path(place).read_bytes()
        system, path = fsspec.core.url_to_fs(place)
        data: bytes = system.cat_file(path)
        return data


def write_bytes(place: str, data: bytes) -> None:
    """Write a file of a store, which shows it whole or not at all. Raises DataError."""
    with _writing(place):
        system, path = fsspec.core.url_to_fs(place)
        system.pipe_file(path, data)


def upload(file: Path, place: str) -> None:
    """Copy a local file into a store, which shows it whole or not at all. Raises DataError."""
    with _writing(place):
        system, path = fsspec.core.url_to_fs(place)
        system.put_file(str(file), path)


def list_sizes(folder: str) -> dict[str, int]:
    """Return the bytes of every file under a folder by its name in the folder; empty where there is none."""
    with reaching(folder):
        system, root = fsspec.core.url_to_fs(folder)
        system.invalidate_cache()
        try:
            found: dict[str, dict[str, Any]] = system.find(root, detail=True)
        except FileNotFoundError:
            return {}
        return {path[len(root.rstrip("/")) + 1 :]: info["size"] for path, info in found.items()}


def remove(folder: str, names: list[str]) -> None:
    """Remove files of a folder of a store."""
    with reaching(folder):
        system, root = fsspec.core.url_to_fs(folder)
        if names:
            system.rm([f"{root.rstrip('/')}/{name}" for name in names])


@contextmanager
def _writing(place: str) -> Iterator[None]:
    with reaching(place):
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(f"Cannot write {place}: there is no such bucket or folder; make it first.") from error
