"""Read a checkpoint: tensors one by one or in part, whatever number of processes wrote it."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mesatron.checkpoint import format as fmt
from mesatron.checkpoint.tensors import DTYPES, tensor_bytes
from mesatron.checkpoint.verify import find_latest
from mesatron.errors import CheckpointError, say
from mesatron.files import naming


class CheckpointReader:
    """An open checkpoint folder.

    state: the content of state.json. step, ranks: of the run that wrote it.
    Raises CheckpointError if the folder is no checkpoint or its manifest is damaged; `verify` checks all bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = fmt.read_manifest(folder)
        self.step: int = manifest["step"]
        self.ranks: int = manifest["ranks"]
        self._tensors: dict[str, dict[str, Any]] = manifest["tensors"]
        self._bounds: dict[Path, dict[str, tuple[int, int]]] = {}
        self.state: dict[str, Any] = json.loads(self.text(fmt.STATE))

    def text(self, name: str) -> str:
        """A text file of the checkpoint, as config.yaml. Raises CheckpointError if it is missing."""
        path = self.folder / name
        try:
            with naming(path):
                return path.read_text()
        except FileNotFoundError:
            raise CheckpointError(f"{self.folder} has no {name}; choose another checkpoint.") from None

    def names(self, kind: str) -> list[str]:
        """Names of all tensors of a kind: `weights`, `optimizer` or `rng`."""
        return list(self._tensors.get(kind, {}))

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises CheckpointError if there is none of that name."""
        return tuple(self._entry(kind, name)["shape"])

    def tensor(self, kind: str, name: str) -> torch.Tensor:
        """A tensor on the CPU, compared with its checksum.

        It is read, not mapped: a mapped file takes memory where it lies in some, and cannot be removed on NFS. Raises
        CheckpointError if there is none of that name or its bytes have changed, OSError if its file cannot be read.
        """
        entry = self._entry(kind, name)
        tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        self.read(kind, name, [(0, 0, tensor.numel())], tensor.view(-1))
        if hashlib.sha256(tensor_bytes(tensor)).hexdigest() != entry["sha256"]:
            raise CheckpointError(
                f"{self.folder / entry['file']} is damaged: tensor {name} has changed; choose another checkpoint."
            )
        return tensor

    def read(self, kind: str, name: str, stretches: Iterable[tuple[int, int, int]], into: torch.Tensor) -> None:
        """Fill parts of `into`, flat and of the tensor's type on the CPU: nothing else of the tensor is in memory.

        stretches: (element of the tensor, element of `into`, number of elements). No checksum covers a part: `verify`
        the checkpoint first. Raises CheckpointError if there is no tensor of that name or its file is too short, and
        OSError if the file cannot be read.
        """
        path, size = self.folder / self._entry(kind, name)["file"], into.dtype.itemsize
        data = tensor_bytes(into)
        try:
            if path not in self._bounds:
                self._bounds[path] = fmt.tensor_bounds(path)
            begin, end = self._bounds[path][name]
            with path.open("rb", buffering=0) as file, naming(path):
                for there, here, count in stretches:
                    rest, position = data[here * size : (here + count) * size], begin + there * size
                    while rest and (read := os.preadv(file.fileno(), [rest], position)):
                        rest, position = rest[read:], position + read
                    if rest or position > end:
                        raise ValueError("it ends early")
        except (FileNotFoundError, ValueError, LookupError) as error:
            raise CheckpointError(
                f"Tensor {name} cannot be read from {path} ({error}); choose another checkpoint."
            ) from error

    def rng(self, rank: int) -> dict[str, torch.Tensor]:
        """The generator states that `rank` wrote, by name; empty if fewer ranks wrote the checkpoint."""
        prefix = f"rank-{rank:05d}/"
        return {
            name.removeprefix(prefix): self.tensor("rng", name) for name in self.names("rng") if name.startswith(prefix)
        }

    def check_model(self, expected: Mapping[str, Sequence[int]]) -> None:
        """Compare the weights' names and shapes with a model's.

        Raises CheckpointError that names the first difference, in the model's order.
        """
        weights = self._tensors.get("weights", {})
        for name, shape in expected.items():
            if name not in weights:
                difference = f"tensor {name} is not in it"
            elif weights[name]["shape"] != list(shape):
                difference = f"tensor {name} has shape {weights[name]['shape']} there and {list(shape)} in the model"
            else:
                continue
            break
        else:
            surplus = [name for name in weights if name not in expected]
            if not surplus:
                return
            difference = f"its tensor {surplus[0]} is not in the model"
        raise CheckpointError(
            f"{self.folder} belongs to another model: {difference}; use its config.yaml or another checkpoint."
        )

    def _entry(self, kind: str, name: str) -> dict[str, Any]:
        try:
            return self._tensors[kind][name]
        except KeyError:
            raise CheckpointError(f"{self.folder} has no {kind} tensor {name}; it belongs to another model.") from None


def open_checkpoint(path: Path) -> CheckpointReader:
    """Open the checkpoint `path`, a checkpoint folder or a run folder (then its newest that verifies).

    Newer ones that do not verify are named on standard error. Raises CheckpointError when there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"There is no run or checkpoint folder {path}; check the path.")
    if not (path / "checkpoints").is_dir() and (fmt.STEP_FOLDER.match(path.name) or (path / fmt.MANIFEST).exists()):
        return CheckpointReader(path)
    latest, skipped = find_latest(path / "checkpoints")
    if latest is None:
        found = f" ({skipped[0].path.name}: {skipped[0].reason})" if skipped else ""
        raise CheckpointError(f"{path} holds no complete checkpoint{found}; train first or choose another run.")
    for info in skipped:
        say(f"passing over {info.path}: {info.reason.rstrip('.')}.")
    return CheckpointReader(latest.path)
