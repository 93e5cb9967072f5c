"""What a call of `prepare` is to do, and the folder it does it in.

Unfinished work lies in a hidden sibling of the output folder, which keeps what is finished when a run is killed; for an
object store it lies in the folder for token files instead:

    .OUTPUT.partial/tokens/        token files, by name of the file of records, unless they have a folder of their own:
                                   there by tokenizer and input folder, for other preparations may be at theirs
    .OUTPUT.partial/REQUEST/notes  descriptions of finished shards
    .OUTPUT.partial/REQUEST/data   what becomes OUTPUT
    .OUTPUT.partial.lock           locked by those who work there; NFS has no locks of folders
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mesatron_data.choice import Cleaning
from mesatron_data.errors import DataError
from mesatron_data.files import PARTIAL_SUFFIX, open_lock, remove_partial, sha256, sync
from mesatron_data.manifest import FORMAT_VERSION, MANIFEST_FILE, Manifest, load_manifest
from mesatron_data.mds import shard_files
from mesatron_data.records import SPLITS, list_files
from mesatron_data.store import is_remote, list_sizes, normal, remove, write_bytes
from mesatron_data.tokenizer import Tokenizer
from mesatron_data.tokens import TokenJob

PACKINGS = ("concatenate", "best_fit")
UNFINISHED_FILE = "unfinished.json"
"""Stands in a store while the manifest does not: its shards are ours to replace."""


@dataclass(frozen=True)
class Options:
    """How documents become samples.

    packing       "concatenate" or "best_fit" (see mesatron_data.pack)
    by_source     pack the training documents of each source by themselves, which a mixture by weights needs
    cleaning      documents to leave out
    token_folder  where token files are put and stay; needed where the output is in an object store
    """

    packing: str = "concatenate"
    by_source: bool = False
    cleaning: Cleaning = field(default_factory=Cleaning)
    token_folder: Path | None = None


@dataclass(frozen=True)
class Plan:
    """One call: `jobs` for every file of records; `request` identifies input and settings. `output` is a local path or
    a URL, `folder` where what becomes it is written."""

    output: str
    work: Path
    tokenizer: Tokenizer
    context_length: int
    token_dtype: str
    samples_per_shard: int
    jobs: list[TokenJob]
    options: Options
    request: str

    @property
    def place(self) -> Path:
        """The local folder to name when there is no space."""
        return self.work if is_remote(self.output) else Path(self.output)

    @property
    def folder(self) -> str:
        return self.output if is_remote(self.output) else str(self.work / self.request / "data")


def make_plan(
    input_folder: str, output_folder: str | Path, tokenizer_path: str | Path, context_length: int, shard_bytes: int,
    options: Options,
) -> Plan:  # fmt: skip
    """Return what a call with these arguments is to do. Raises DataError for arguments that cannot be."""
    output = normal(output_folder)
    if is_remote(output):
        if options.token_folder is None:
            raise DataError(f"{output} is remote: name a folder on this machine for the work (data.token_folder).")
        beside = options.token_folder.absolute() / output.partition("://")[2].replace("/", "-")
    else:
        output = os.path.realpath(output)  # of a link it is the folder that is replaced, on its own file system
        beside = Path(output)
    work = beside.with_name(f".{beside.name}.partial")
    tokenizer = Tokenizer.load(tokenizer_path)
    tokens = work / "tokens"
    if options.token_folder:
        corpus = normal(input_folder) if is_remote(input_folder) else os.path.abspath(normal(input_folder))
        tokens = options.token_folder.absolute() / tokenizer.sha256[:16] / sha256(corpus.encode())[:16]
    dtype = "uint16" if tokenizer.vocabulary_size <= 1 << 16 else "uint32"
    if context_length < 1:
        raise DataError(f"context_length is {context_length}: give at least 1 token.")
    if options.packing not in PACKINGS:
        raise DataError(f"There is no packing {options.packing!r}: choose one of {', '.join(PACKINGS)}.")
    sample_bytes = (context_length + 1) * np.dtype(dtype).itemsize
    if shard_bytes < sample_bytes:
        raise DataError(
            f"shard_bytes {shard_bytes} cannot hold samples of {context_length} tokens: give {sample_bytes} or more."
        )
    jobs = [
        TokenJob(split, file, tokens / file.name, Path(tokenizer_path), tokenizer.sha256, dtype)
        for split in SPLITS
        for file in list_files(input_folder, split)
    ]
    inputs = [job.request for job in jobs]
    how = (context_length, shard_bytes, options.packing, options.by_source, options.cleaning)
    request = sha256(repr((FORMAT_VERSION, inputs, how)).encode())
    samples_per_shard = shard_bytes // sample_bytes
    return Plan(output, work, tokenizer, context_length, dtype, samples_per_shard, jobs, options, request)


def existing(plan: Plan, overwrite: bool) -> Manifest | None:
    """Return the manifest when the output is there, of the same request; None when there is none or it may be replaced;
    else raise DataError."""
    output = plan.output
    files = list_sizes(output)
    if not files:
        return None
    if MANIFEST_FILE not in files:
        if is_remote(output) and UNFINISHED_FILE in files:
            return None
        raise DataError(
            f"{output} exists and is not a prepared data folder: choose another output folder or remove it."
        )
    if overwrite:
        return None
    manifest = load_manifest(output)
    if manifest.request != plan.request:
        raise DataError(
            f"{output} was prepared from other input or settings: choose another output folder or ask to overwrite it."
        )
    for split, shards in shard_files(output, manifest).items():
        for shard in shards:
            name = f"{split}/{shard['zip_data']['basename']}"
            if files.get(name) != shard["zip_data"]["bytes"]:
                raise DataError(
                    f"{output}/{name} is missing or cut short: ask to overwrite {output} to prepare it again."
                )
    return manifest


@contextmanager
def locked(plan: Plan, alone: bool) -> Iterator[None]:
    """Make the work folder and hold its lock: with `alone` against every other run, else against those that are. Who
    has gone through alone leaves no lock file."""
    plan.work.mkdir(parents=True, exist_ok=True)
    path = plan.work.with_name(f"{plan.work.name}.lock")
    lock = open_lock(path)
    try:
        try:
            fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if not os.fstat(lock).st_nlink:
                raise BlockingIOError("another run went through, and removed this file, as it was opened here")
        except BlockingIOError as error:
            raise DataError(
                f"Another run is writing {plan.output}: wait for it or choose another output folder."
            ) from error
        yield
        if alone:
            path.unlink()
    finally:
        os.close(lock)


def clear(plan: Plan) -> None:
    """Remove shards of other requests and what killed runs had only begun, and take the place of what is to be
    replaced in a store."""
    for path in plan.work.iterdir():
        if path.name not in ("tokens", plan.request):
            shutil.rmtree(path)
    for path in plan.work.rglob(f"*{PARTIAL_SUFFIX}"):
        path.unlink()
    if plan.options.token_folder:
        remove_partial(plan.options.token_folder)
    if is_remote(plan.output) and not (plan.work / plan.request).exists():
        write_bytes(f"{plan.output}/{UNFINISHED_FILE}", b"{}\n")
        names = list_sizes(plan.output)
        remove(plan.output, [name for name in names if name == MANIFEST_FILE])
        remove(plan.output, [name for name in names if name not in (MANIFEST_FILE, UNFINISHED_FILE)])


def put_in_place(plan: Plan, files: dict[str, bytes]) -> None:
    """Add the small files, the manifest last, and give the output its name."""
    if is_remote(plan.output):
        for name, data in files.items():
            write_bytes(f"{plan.output}/{name}", data)
        remove(plan.output, [UNFINISHED_FILE])
        return
    for name, data in files.items():
        path = Path(plan.folder, name)
        path.write_bytes(data)
        sync(path)
    output = Path(plan.output)
    replaced = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if output.exists():
        output.rename(replaced)
    Path(plan.folder).rename(output)
    sync(output.parent)
    shutil.rmtree(replaced, ignore_errors=True)
