"""Write a checkpoint: every rank puts the elements it holds into place, then one rank makes the folder count.

Nothing here is a collective. Between the steps all ranks must have done the one before:

    writer = CheckpointWriter(root, step, rank, world_size, attempt, specs)
    written = writer.write(fragments)       every rank, its own elements into whatever files they belong in
    checked = writer.checksum()             every rank, the files of its number, read back
    writer.commit(state, texts, [written of every rank], [checked of every rank])      one rank

A kill anywhere before the rename in `commit` leaves a `.incomplete-*` folder, which no reader takes for a checkpoint.

Files are shared by ranks, each of which writes its ranges of bytes and syncs them before anybody reads: local file
systems and those of clusters (NFS, Lustre, GPFS) then show the same bytes everywhere. Should a range get lost all the
same, `commit` notices: the sum of the elements that ranks put into a tensor is compared with the sum of what was read.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesatron.checkpoint import format as fmt
from mesatron.checkpoint.tensors import DTYPE_CODES, Fragment, TensorSpec, encode_header, tensor_bytes
from mesatron.checkpoint.verify import find_damage, nothing
from mesatron.errors import CheckpointError, DiskFullError
from mesatron.files import open_durable, reporting_full_disk, sync_folder, write_all_at, write_file

Tallies = dict[str, list[int]]
"""kind/name to the number of elements and their sum, taken as unsigned integers, modulo 2^64."""

_BLOCK_BYTES = 1 << 22
_SYNC_BYTES = 1 << 28
"""Brought to the disk at a time: nothing can interrupt that, nor would show whether it gets on."""


class _Place(NamedTuple):
    """Where a tensor lies: its file, and its first byte there."""

    file: str
    offset: int
    spec: TensorSpec


class CheckpointWriter:
    """One rank's part in saving one step.

    root: the run's checkpoint folder. attempt: the same on all ranks, unique to this start of the run, usable in a
    file name; it tells this start's temporary folders from those of dead ones. specs: for each kind all tensors of the
    checkpoint, the same on all ranks; tensor i goes into file i modulo world_size. interrupt: called between blocks of
    bytes; what it raises ends the save.
    Raises ValueError for tensors that a file cannot hold, see `encode_header`.
    """

    def __init__(
        self, root: Path, step: int, rank: int, world_size: int, attempt: str,
        specs: Mapping[str, Sequence[TensorSpec]], interrupt: Callable[[], None] = nothing,
    ) -> None:  # fmt: skip
        self.root, self.step, self.rank, self.world_size, self.attempt = root, step, rank, world_size, attempt
        self.folder = root / f".incomplete-{fmt.step_name(step)}-{attempt}"
        self._specs, self._interrupt = specs, interrupt
        self._headers: dict[str, bytes] = {}
        self._places: dict[tuple[str, str], _Place] = {}
        for kind in specs:
            for number in range(world_size):
                held = self._held(kind, number)
                header = self._headers[_file_name(kind, number)] = encode_header(held)
                offset = len(header)
                for spec in held:
                    self._places[kind, spec.name] = _Place(_file_name(kind, number), offset, spec)
                    offset += spec.size_bytes

    def write(self, fragments: Iterable[Fragment]) -> Tallies:
        """Put elements into their places and bring them to the disk; returns what was put there.

        Raises ValueError for a tensor or type that is not in the specification, DiskFullError.
        """
        with reporting_full_disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        by_file: dict[str, list[tuple[_Place, Fragment]]] = {_file_name(kind, self.rank): [] for kind in self._specs}
        for fragment in fragments:
            place = self._places.get((fragment.kind, fragment.name))
            if place is None or place.spec.dtype != fragment.values.dtype:
                raise ValueError(f"No place for {fragment.kind} tensor {fragment.name}, {fragment.values.dtype}.")
            by_file.setdefault(place.file, []).append((place, fragment))
        tallies: Tallies = {}
        for file, pieces in by_file.items():
            path = self.folder / file
            with reporting_full_disk(path), open_durable(path, shared=True) as descriptor:
                if file in self._own_files():
                    self._lay_out(path, descriptor)
                unsynced = 0
                for place, fragment in pieces:
                    tally = tallies.setdefault(f"{fragment.kind}/{fragment.name}", [0, 0])
                    for count, total in self._put(descriptor, place, fragment):
                        tally[:] = tally[0] + count, (tally[1] + total) % 2**64
                        unsynced += count * place.spec.dtype.itemsize
                        if unsynced >= _SYNC_BYTES:
                            os.fsync(descriptor)
                            unsynced = 0
        return tallies

    def checksum(self) -> dict[str, Any]:
        """Read back the files of this rank's number: sizes, checksums, tallies. All ranks must have written theirs.

        Raises CheckpointError when a file is too short.
        """
        files, tensors, found = {}, {}, {}
        for kind in self._specs:
            name = _file_name(kind, self.rank)
            path = self.folder / name
            with path.open("rb") as file:
                file_digest = hashlib.sha256(file.read(len(self._headers[name])))
                for spec in self._held(kind, self.rank):
                    digest, count, total = hashlib.sha256(), 0, 0
                    while rest := spec.size_bytes - count * spec.dtype.itemsize:
                        self._interrupt()
                        block = file.read(min(rest, _BLOCK_BYTES))
                        if not block:
                            raise CheckpointError(f"{path} ends within tensor {spec.name}; report this.")
                        file_digest.update(block)
                        digest.update(block)
                        count += len(block) // spec.dtype.itemsize
                        total = (total + _sum(block, spec)) % 2**64
                    found[f"{kind}/{spec.name}"] = [count, total]
                    about = {"file": name, "dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape)}
                    tensors[f"{kind}/{spec.name}"] = about | {"sha256": digest.hexdigest()}
            files[name] = {"size": path.stat().st_size, "sha256": file_digest.hexdigest()}
        return {"files": files, "tensors": tensors, "found": found}

    def commit(
        self, state: Mapping[str, Any], texts: Mapping[str, str], written: Iterable[Tallies],
        checked: Iterable[Mapping[str, Any]], fence: Callable[[], None] = nothing,
    ) -> Path:  # fmt: skip
        """On one rank, when all have checked: make the folder the checkpoint of its step and return its path.

        state: goes to state.json as it is. texts: further files by name (config.yaml, environment.json). fence: called
        right before the folder gets its name; what it raises leaves everything as it was.
        A verifying checkpoint of the same step is kept and this one dropped; one that does not verify is set aside.
        Raises CheckpointError if elements of a tensor are missing or were written twice; DiskFullError.
        """
        final = self.root / fmt.step_name(self.step)
        files: dict[str, Any] = {}
        tensors: dict[str, dict[str, Any]] = {kind: {} for kind in self._specs}
        found: Tallies = {}
        for part in checked:
            files |= part["files"]
            found |= part["found"]
            for name, about in part["tensors"].items():
                kind, _, rest = name.partition("/")
                tensors[kind][rest] = about
        self._compare(found, written)
        with reporting_full_disk(self.folder):
            for name, data in {fmt.STATE: fmt.to_json(state), **{k: v.encode() for k, v in texts.items()}}.items():
                write_file(self.folder / name, data)
                files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
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
            sound = final.exists() and find_damage(final, self._interrupt) is None
            fence()
            if sound:
                self.discard()
            else:
                if final.exists():
                    fmt.set_aside(final, "damaged", self.attempt)
                os.rename(self.folder, final)
                sync_folder(self.root)
            fmt.point_latest(self.root, final.name)
        return final

    def discard(self) -> None:
        """Remove what has been written, if anything. No other rank may be writing any more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _held(self, kind: str, number: int) -> Sequence[TensorSpec]:
        # Wide types first, as the layout wants them.
        return sorted(self._specs[kind][number :: self.world_size], key=attrgetter("dtype.itemsize"), reverse=True)

    def _own_files(self) -> list[str]:
        return [_file_name(kind, self.rank) for kind in self._specs]

    def _lay_out(self, path: Path, descriptor: int) -> None:
        """Give a file its header and size; other ranks may be writing into it already."""
        header = self._headers[path.name]
        size = len(header) + sum(place.spec.size_bytes for place in self._places.values() if place.file == path.name)
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise DiskFullError(
                f"{path} needs {size / 1e6:.1f} MB and {free / 1e6:.1f} MB are free; "
                "free some space and start the same command again."
            )
        os.ftruncate(descriptor, size)
        write_all_at(descriptor, header, 0)

    def _put(self, descriptor: int, place: _Place, fragment: Fragment) -> Iterator[tuple[int, int]]:
        """Write a fragment block by block; yields the number of elements of each and their sum."""
        data, size = tensor_bytes(fragment.values), place.spec.dtype.itemsize
        in_block = _BLOCK_BYTES // size
        for whole, here, count in fragment.stretches:
            for done in range(0, count, in_block):
                self._interrupt()
                first, number = here + done, min(in_block, count - done)
                block = data[first * size : (first + number) * size]
                write_all_at(descriptor, block, place.offset + (whole + done) * size)
                yield number, _sum(block, place.spec)

    def _compare(self, found: Tallies, written: Iterable[Tallies]) -> None:
        put: Tallies = {}
        for tallies in written:
            for name, (count, total) in tallies.items():
                before = put.get(name, [0, 0])
                put[name] = [before[0] + count, (before[1] + total) % 2**64]
        for name, (count, total) in found.items():
            there, sum_there = put.get(name, [0, 0])
            if there != count:
                raise CheckpointError(
                    f"{there} of the {count} elements of tensor {name} of step {self.step} were written; report this."
                )
            if sum_there != total:
                raise CheckpointError(
                    f"{self.folder} does not give back what was written of tensor {name}; check the file system."
                )


def _file_name(kind: str, number: int) -> str:
    return f"{kind}-{number:05d}.safetensors"


def _sum(data: bytes | memoryview, spec: TensorSpec) -> int:
    return int(np.frombuffer(data, f"u{spec.dtype.itemsize}").sum(dtype=np.uint64))
