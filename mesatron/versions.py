"""Of installed packages. Free of torch."""

from __future__ import annotations

from importlib import metadata


def installed_version(package: str) -> str | None:
    """None for one that only lies on the path, or is not there at all."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
