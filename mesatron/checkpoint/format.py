"""The checkpoint format: names of folders and files, the manifest, checksums. Free of torch.

    checkpoints/
      step-00001000/                   complete: manifest.json is there and everything in it verifies
        weights-00000.safetensors      fp32 weights; tensor i lies in file i modulo the number of ranks
        optimizer-00000.safetensors    exp_avg/<name>, exp_avg_sq/<name>
        rng-00000.safetensors          rank-00000/<generator>
        state.json  config.yaml  environment.json
        manifest.json                  written last
      latest -> step-00001000          for people; resuming scans the folders instead
      .incomplete-step-...-<attempt>   a save under way or cut off
      .trash-step-...-<attempt>        a checkpoint being removed
      damaged-step-...-<attempt>       a checkpoint that did not verify, set aside

Each tensor stands whole in exactly one file, so nothing depends on the layout that wrote it.
"""

import hashlib
import itertools
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

from mesatron.errors import CheckpointError
from mesatron.files import naming, sync_folder

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
STEP_FOLDER = re.compile(r"step-(\d{8,})")
UNFINISHED_FOLDER = re.compile(r"\.(incomplete|trash)-step-(\d{8,})-(.+)")
DAMAGED_FOLDER = re.compile(r"damaged-step-(\d{8,})-(.+)")
_BLOCK_BYTES = 1 << 22


def step_name(step: int) -> str:
    """`step-00001000` for step 1000."""
    return f"step-{step:08d}"


def to_json(value: Any) -> bytes:
    """Readable JSON in UTF-8. Raises ValueError for NaN and infinities, which JSON does not have."""
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"


def sha256_of_file(path: Path, start: int = 0, stop: int | None = None) -> str:
    """SHA-256, in hexadecimal, of the bytes `start` to `stop` of a file (to its end if None)."""
    digest = hashlib.sha256()
    with path.open("rb") as file, naming(path):
        file.seek(start)
        rest = (path.stat().st_size if stop is None else stop) - start
        while rest > 0 and (block := file.read(min(rest, _BLOCK_BYTES))):
            digest.update(block)
            rest -= len(block)
    return digest.hexdigest()


def tensor_bounds(path: Path) -> dict[str, tuple[int, int]]:
    """First byte and end of every tensor in a safetensors file. Raises ValueError when it has no such header."""
    with path.open("rb") as file, naming(path):
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        header = json.loads(file.read(min(length, path.stat().st_size)))
    try:
        bounds = {name: about["data_offsets"] for name, about in header.items() if name != "__metadata__"}
        return {name: (8 + length + first, 8 + length + last) for name, (first, last) in bounds.items()}
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path} has no header of tensors.") from error


def seal(manifest: dict[str, Any]) -> bytes:
    """The manifest's bytes, with a checksum of its own so that a change in the manifest itself is noticed."""
    return to_json({**manifest, "manifest_sha256": _manifest_checksum(manifest)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder: format, step, ranks, files and tensors with their checksums.

    Raises CheckpointError if it is missing, damaged, of another format version, or of another step than the folder.
    """
    path = folder / MANIFEST
    try:
        with naming(path):
            manifest = json.loads(path.read_bytes())
        checksum = manifest.pop("manifest_sha256")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}; choose another.") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{path} is damaged: it is no manifest; choose another checkpoint.") from None
    if checksum != _manifest_checksum(manifest):
        raise CheckpointError(f"{path} is damaged: its own checksum differs; choose another checkpoint.")
    if manifest["format"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, not {FORMAT_VERSION}; use the version that wrote it."
        )
    name = STEP_FOLDER.fullmatch(folder.name)
    if name and int(name[1]) != manifest["step"]:
        raise CheckpointError(f"{folder} holds step {manifest['step']}, not that of its name; rename it back.")
    return manifest


def set_aside(folder: Path, prefix: str, attempt: str) -> Path:
    """Rename a checkpoint folder, in one step, to a name that no reader takes for a checkpoint; return it."""
    name = f"{prefix}-{folder.name}-{attempt}"
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    target = next(path for path in map(folder.with_name, candidates) if not path.exists())
    os.rename(folder, target)
    sync_folder(folder.parent)
    return target


def point_latest(root: Path, name: str) -> None:
    """Let `latest` name a checkpoint in `root`, in one step."""
    link = root / f".{LATEST}"
    link.unlink(missing_ok=True)
    os.symlink(name, link)
    os.replace(link, root / LATEST)
    sync_folder(root)


def _manifest_checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
