"""Write a checkpoint: every rank streams its own files, then one rank makes the folder count, in one step.

The caller runs the barriers; nothing here is a collective:

    writer = CheckpointWriter(root, step, rank, world_size, attempt)
    writer.write_tensors("weights", specs, tensors)       every rank, the tensors it owns
    writer.write_tensors("optimizer", specs, tensors)
    writer.write_rng({"torch": torch.get_rng_state()})
    writer.finish()
    barrier()
    if rank == 0:
        writer.commit(state, texts, expected)
    barrier()

A kill anywhere before the rename in `commit` leaves a `.incomplete-*` folder, which no reader takes for a checkpoint.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mesatron.checkpoint import format as fmt
from mesatron.checkpoint.tensors import DTYPE_CODES, TensorSpec, write_stream
from mesatron.checkpoint.verify import find_damage
from mesatron.errors import CheckpointError, DiskFullError, PeerLostError
from mesatron.files import open_durable, reporting_full_disk, sync_folder, write_file


class CheckpointWriter:
    """One rank's part in saving one step.

    root: the run's checkpoint folder. attempt: the same on all ranks, unique to this start of the run, usable in a
    file name; it tells this start's temporary folders from those of dead ones.
    Every method raises DiskFullError when there is no space, after removing the temporary folder.
    """

    def __init__(self, root: Path, step: int, rank: int, world_size: int, attempt: str) -> None:
        self.root = root
        self.step = step
        self.rank = rank
        self.world_size = world_size
        self.attempt = attempt
        self.folder = root / f".incomplete-{fmt.step_name(step)}-{attempt}"
        self._files: dict[str, dict[str, Any]] = {}
        self._tensors: dict[str, dict[str, Any]] = {}
        with self._saving(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def write_tensors(
        self, kind: str, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Stream the tensors that this rank owns into `<kind>-<rank>.safetensors`, one in memory at a time.

        specs: names, shapes and types in the order of arrival. tensors: may be a generator that runs the gather of
        every parameter on every rank and yields only the owned ones; it is run to its end.
        Raises ValueError if a tensor differs from its specification.
        """
        name = f"{kind}-{self.rank:05d}.safetensors"
        path = self.folder / name
        needed = sum(spec.size_bytes for spec in specs)
        with self._saving(path, needed):
            free = shutil.disk_usage(self.folder).free
            if needed > free:
                raise DiskFullError(
                    f"{path} needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free; "
                    "free some space and start the same command again."
                )
            with open_durable(path) as descriptor:
                checksum, tensor_checksums = write_stream(descriptor, specs, tensors)
        self._files[name] = {"size": path.stat().st_size, "sha256": checksum}
        self._tensors[kind] = {
            spec.name: {
                "file": name,
                "dtype": DTYPE_CODES[spec.dtype],
                "shape": list(spec.shape),
                "sha256": tensor_checksums[spec.name],
            }
            for spec in specs
        }

    def write_rng(self, states: Mapping[str, torch.Tensor]) -> None:
        """Write this rank's random generator states; `CheckpointReader.rng(rank)` gives them back."""
        named = {f"rank-{self.rank:05d}/{name}": state for name, state in states.items()}
        ordered = sorted(named.items(), key=lambda item: -item[1].dtype.itemsize)
        self.write_tensors("rng", [TensorSpec.of(name, state) for name, state in ordered], ordered)

    def finish(self) -> None:
        """Leave a note of what this rank has written for the rank that commits. Then comes the caller's barrier."""
        path = self._part(self.rank)
        with self._saving(path):
            write_file(path, fmt.to_json({"files": self._files, "tensors": self._tensors}))

    def commit(
        self, state: Mapping[str, Any], texts: Mapping[str, str], expected: Mapping[str, Collection[str]]
    ) -> Path:
        """On one rank, when all have finished: make the folder the checkpoint of its step and return its path.

        state: goes to state.json as it is. texts: further files by name (config.yaml, environment.json).
        expected: for each kind the names of all its tensors, over all ranks.
        A verifying checkpoint of the same step is kept and this one dropped; one that does not verify is set aside.
        Raises CheckpointError if a tensor is missing or was written twice.
        """
        final = self.root / fmt.step_name(self.step)
        with self._saving(self.folder):
            files, tensors = self._merge_parts()
            for kind, names in expected.items():
                if missing := sorted(set(names) - set(tensors.get(kind, {}))):
                    raise CheckpointError(
                        f"No rank wrote the {kind} tensor {missing[0]} of step {self.step}; report this."
                    )
            for name, data in {fmt.STATE: fmt.to_json(state), **{k: v.encode() for k, v in texts.items()}}.items():
                write_file(self.folder / name, data)
                files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for rank in range(self.world_size):
                os.unlink(self._part(rank))
            sync_folder(self.folder)
            manifest = {
                "format": fmt.FORMAT_VERSION,
                "step": self.step,
                "ranks": self.world_size,
                "files": files,
                "tensors": tensors,
            }
            write_file(self.folder / fmt.MANIFEST, fmt.seal(manifest))
            sync_folder(self.folder)
            if final.exists() and find_damage(final) is None:
                shutil.rmtree(self.folder)
            else:
                if final.exists():
                    fmt.set_aside(final, "damaged", self.attempt)
                os.rename(self.folder, final)
                sync_folder(self.root)
            self._point_latest(final.name)
        return final

    def _merge_parts(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        files: dict[str, Any] = {}
        tensors: dict[str, dict[str, Any]] = {}
        for rank in range(self.world_size):
            part = json.loads(self._part(rank).read_bytes())
            files |= part["files"]
            for kind, entries in part["tensors"].items():
                merged = tensors.setdefault(kind, {})
                if twice := sorted(merged.keys() & entries):
                    raise CheckpointError(
                        f"Two ranks wrote the {kind} tensor {twice[0]} of step {self.step}; report this."
                    )
                merged |= entries
        return files, tensors

    def _point_latest(self, name: str) -> None:
        link = self.root / f".{fmt.LATEST}"
        link.unlink(missing_ok=True)
        os.symlink(name, link)
        os.replace(link, self.root / fmt.LATEST)
        sync_folder(self.root)

    def _part(self, rank: int) -> Path:
        return self.folder / f"part-{rank:05d}.json"

    @contextmanager
    def _saving(self, path: Path, needed_bytes: int | None = None) -> Iterator[None]:
        """Say in one line that the disk is full, and give back the space taken; say so too when another rank has."""
        try:
            with reporting_full_disk(path, needed_bytes):
                yield
        except DiskFullError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        except FileNotFoundError as error:
            raise PeerLostError(
                f"{error.filename} vanished while rank {self.rank} saved step {self.step}; see the other ranks' errors."
            ) from error
