"""Find checkpoints on disk and tell the complete ones from the rest. Free of torch; nothing on the disk is changed."""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from mesatron.checkpoint import format as fmt
from mesatron.errors import CheckpointError

Alive = Callable[[], None]
"""Called after each file that was read: of large checkpoints that takes minutes in all."""


def nothing() -> None:
    """What is called where nobody asks for signs of life."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A folder that is, was or should have become a checkpoint. reason: why it is not complete, else empty.

    An unreadable one may be found complete when its storage answers again.
    """

    step: int
    path: Path
    status: Literal["complete", "incomplete", "damaged", "unreadable"]
    reason: str = ""


def list_checkpoints(root: Path, deep: bool = False) -> list[CheckpointInfo]:
    """Everything in `root` that looks like a checkpoint or its remains, by step.

    Cheap by default: the manifest is intact and the files have their sizes. deep: checksums too, at the disk's speed.
    """
    found = []
    for entry in sorted(os.scandir(root), key=attrgetter("name")) if root.is_dir() else []:
        path = root / entry.name
        if not entry.is_dir(follow_symlinks=False):  # known by the listing, for a folder that fails too
            continue
        if match := fmt.STEP_FOLDER.fullmatch(path.name):
            found.append(_examine(path, int(match[1]), deep))
        elif match := fmt.UNFINISHED_FOLDER.fullmatch(path.name):
            what = "its save was cut off or is under way" if match[1] == "incomplete" else "its removal was cut off"
            found.append(CheckpointInfo(int(match[2]), path, "incomplete", what))
        elif match := fmt.DAMAGED_FOLDER.fullmatch(path.name):
            found.append(CheckpointInfo(int(match[1]), path, "damaged", "it did not verify and was set aside"))
    return sorted(found, key=lambda info: info.step)


def find_latest(
    root: Path, before: float = math.inf, alive: Alive = nothing
) -> tuple[CheckpointInfo | None, list[CheckpointInfo]]:
    """The newest checkpoint whose every checksum is right, and the newer ones passed over, each with its reason.

    before: a step from which on nothing is looked at.
    """
    skipped: list[CheckpointInfo] = []
    for info in reversed([info for info in list_checkpoints(root) if info.step < before]):
        if info.status == "complete":
            info = _examine(info.path, info.step, True, alive)
        if info.status == "complete":
            return info, skipped
        skipped.append(info)
    return None, skipped


def verify(folder: Path) -> None:
    """Check every byte of a checkpoint.

    Raises CheckpointError that names the first wrong file and the tensor whose bytes differ.
    """
    fmt.read_manifest(folder)
    if damage := find_damage(folder):
        raise CheckpointError(f"{folder} is damaged: {damage}; choose another checkpoint.")


def find_damage(folder: Path, alive: Alive = nothing) -> str | None:
    """What is wrong with a checkpoint, first thing first; None if nothing is."""
    try:
        return _find_damage(folder, True, alive)
    except OSError as error:
        return _unreadable(error)


def _find_damage(folder: Path, deep: bool, alive: Alive) -> str | None:
    """The same; raises OSError for what cannot be read."""
    try:
        manifest = fmt.read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
    return next(_wrong_checksums(folder, manifest, alive), None) if deep else None


def _examine(path: Path, step: int, deep: bool, alive: Alive = nothing) -> CheckpointInfo:
    try:
        if not (path / fmt.MANIFEST).exists():
            return CheckpointInfo(step, path, "incomplete", f"{fmt.MANIFEST} is missing")
        damage = _find_damage(path, deep, alive)
    except OSError as error:
        return CheckpointInfo(step, path, "unreadable", _unreadable(error))
    return CheckpointInfo(step, path, "damaged" if damage else "complete", damage or "")


def _unreadable(error: OSError) -> str:
    return f"{Path(error.filename).name} cannot be read ({error.strerror})"


def _wrong_checksums(folder: Path, manifest: dict[str, Any], alive: Alive) -> Iterator[str]:
    files = manifest["files"]
    # Hashing releases the interpreter lock: a file per thread checks at the disk's speed.
    with ThreadPoolExecutor() as pool:
        checksums = pool.map(fmt.sha256_of_file, (folder / name for name in files))
        for (name, entry), checksum in zip(files.items(), checksums, strict=True):
            alive()
            if checksum != entry["sha256"]:
                tensors = [
                    (tensor, about["sha256"])
                    for entries in manifest["tensors"].values()
                    for tensor, about in entries.items()
                    if about["file"] == name
                ]
                yield f"the checksum of {name} differs{_name_changed_part(folder / name, tensors)}"


def _name_changed_part(path: Path, tensors: list[tuple[str, str]]) -> str:
    if not tensors:
        return ""
    try:
        bounds = fmt.tensor_bounds(path)
        for name, checksum in tensors:
            if fmt.sha256_of_file(path, *bounds[name]) != checksum:
                return f": tensor {name} has changed"
    except (ValueError, LookupError):
        pass
    return ": its header has changed"
