"""`mesatron doctor run`: in every process of a run, before it trains: is each node fit, and like the others?

Each process examines its node and says what it found; then they talk, over gloo on CPUs, and over NCCL if all have
GPUs. A fault or difference that only some nodes have is theirs; one that all have is the config's or the data's. A node
that is alone has nothing to compare with: its GPUs and shared memory are taken for its own.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mesatron_data.errors import DataError
from mesatron_data.files import storage_failed
from mesatron_data.manifest import load_manifest
from mesatron_data.tokenizer import Tokenizer

from mesatron.cluster.job import LAUNCH_FOLDER, UNFIT_FILE
from mesatron.cluster.words import FOLDER, node_name
from mesatron.config import Config, check_prepared
from mesatron.errors import REPORTED, ConfigError, DiskFullError, MesatronError, PeerLostError, StorageError, UnfitError
from mesatron.files import replace_file
from mesatron.kernel_choice import choose_kernels
from mesatron.parallel import distributed
from mesatron.parallel.distributed import Place, place
from mesatron.versions import installed_version

LEAST_SHARED_MEMORY = 64 << 20  # bytes; what the collectives of a node need at most
LEAST_FREE_GPU_MEMORY = 0.9
CHECKPOINT_BYTES = 12  # a parameter: weight and two moments in fp32
LARGEST_SKEW_SECONDS = 5.0
REDUCED_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}
ROUNDS = 3

Kind = type[MesatronError] | type[DataError]


@dataclass
class Findings:
    """What a process says of its node: `problems`, a clause each, and `facts` that should be the same everywhere."""

    node: str
    problems: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    has_gpu: bool = False
    is_shared: bool = False
    """Whether one of the problems may be the config's or a shared folder's, so that no other node would do better."""
    kinds: list[Kind] = field(default_factory=list)
    """What a training would raise for them, where that is known."""

    def add(self, problem: str, is_shared: bool = False, kind: Kind | None = None) -> None:
        self.problems.append(problem)
        self.is_shared |= is_shared
        self.kinds += [kind] if kind else []


def examine(config: Config, here: Place) -> Findings:
    """The node of this process, which is `here`, without any other."""
    found = Findings(node_name())

    def attempt(check: Callable[[], None], is_shared: bool) -> None:
        try:
            check()
        except REPORTED as error:
            found.add(_clause(error), True, type(error))
        except (OSError, RuntimeError) as error:
            found.add(_clause(error), is_shared, StorageError if storage_failed(error) else None)

    def gpus() -> None:
        found.has_gpu = torch.cuda.is_available()
        count = torch.cuda.device_count()
        if not found.has_gpu:
            found.facts["GPUs"] = "none"
            choose_kernels(config, torch.device("cpu"))
            return
        if count < here.local_size:
            given = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
            found.add(f"it has {count} GPUs for {here.local_size} processes", is_shared=here.local_size > given)
            return
        found.facts["GPUs"] = f"{count} x {torch.cuda.get_device_name(here.local_rank)}"
        free, total = torch.cuda.mem_get_info(here.local_rank)
        found.facts["GPU memory in GiB"] = f"{total / 2**30:.0f}"
        if free < LEAST_FREE_GPU_MEMORY * total:
            found.add(f"GPU {here.local_rank} has only {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
        if here.local_rank == 0:  # remembered for the others
            choose_kernels(config, torch.device("cuda", here.local_rank))

    def versions() -> None:
        found.facts["torch"] = torch.__version__
        found.facts["triton"] = installed_version("triton") or "none"
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists():
            found.facts["driver"] = driver.read_text().partition("\n")[0]

    def shared_memory() -> None:
        shared = shutil.disk_usage("/dev/shm").free
        if shared < LEAST_SHARED_MEMORY:
            found.add(f"/dev/shm has {shared >> 20} MiB free, fewer than {LEAST_SHARED_MEMORY >> 20}")

    def space() -> None:
        free, needed = shutil.disk_usage(config.run_folder).free, 2 * CHECKPOINT_BYTES * config.model.parameter_count()
        if free < needed:
            found.add(
                f"{config.run_folder} has {free / 1e9:.1f} GB free, two checkpoints take {needed / 1e9:.1f}",
                is_shared=True,
                kind=DiskFullError,
            )

    def data() -> None:
        manifest = load_manifest(str(config.data.folder))
        check_prepared(config, manifest, config.data.folder)
        own = config.tokenizer.path
        tokenizer = Tokenizer.load(own).sha256 if own.exists() else manifest.tokenizer_sha256
        found.facts |= {"data": manifest.fingerprint[:12], "tokenizer": tokenizer[:12]}

    for check in (gpus, versions, shared_memory):
        attempt(check, is_shared=False)
    for check in (space, data):
        attempt(check, is_shared=True)
    return found


def _clause(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def judge(findings: Sequence[Findings]) -> dict[str, str]:
    """The nodes that are unfit, with the reason; empty if all is well.

    Raises what a training would for a problem that all nodes have, since other nodes would have it too; where there is
    but one, for a problem that is not its own: StorageError before all else, since another start may help, ConfigError
    for what is not known.
    """
    nodes = {finding.node for finding in findings}
    unfit: dict[str, str] = {}
    for finding in findings:
        if finding.problems:
            unfit.setdefault(finding.node, "; ".join(finding.problems))
    if nodes == unfit.keys() and (len(nodes) > 1 or any(finding.is_shared for finding in findings)):
        worst, kind = min(
            ((finding, kind) for finding in findings if finding.problems for kind in finding.kinds or [ConfigError]),
            key=lambda pair: (pair[1].exit_code != StorageError.exit_code, not pair[0].kinds),
        )
        raise kind(f"No node is fit for the run: on {worst.node}, {'; '.join(worst.problems)}.")
    for fact in sorted({name for finding in findings for name in finding.facts}):
        values = Counter(finding.facts.get(fact, "none") for finding in findings if finding.node not in unfit)
        if len(values) > 1:
            usual = values.most_common(1)[0][0]
            for finding in findings:
                value = finding.facts.get(fact, "none")
                if value != usual and finding.node not in unfit:
                    unfit[finding.node] = f"{fact} is {value}, elsewhere {usual}"
    return unfit


def run(config: Config, seconds: float) -> str:
    """Examine all nodes together; returns a line of what was found, the same in all processes.

    Raises UnfitError naming nodes that are unfit, for what is wrong everywhere what a training would (see `judge`), and
    PeerLostError when not all processes have answered within `seconds`.
    """
    here = place()
    config.run_folder.mkdir(parents=True, exist_ok=True)
    own = examine(config, here)
    timeout = datetime.timedelta(seconds=seconds)
    store = dist.HashStore() if here.size == 1 else None
    try:
        dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size, timeout=timeout)
        findings = _gather(own)
        seen = _gather_shared(config.run_folder / LAUNCH_FOLDER)
        offsets = _clock_offsets()
        for finding, sees, offset in zip(findings, seen, offsets, strict=True):
            if not sees:
                finding.add(f"{config.run_folder} there is not the folder of the first node", is_shared=True)
            if abs(offset) > LARGEST_SKEW_SECONDS:
                finding.add(f"its clock is {offset:+.1f} s off that of the first node")
        unfit = judge(findings)
        if unfit:
            _tell(unfit)
            raise UnfitError("; ".join(f"Node {node} is unfit: {why}" for node, why in unfit.items()) + ".")
        backend = "nccl" if own.has_gpu else "gloo"
        reduced = _try_reduce(backend, here, timeout) if here.size > 1 else ""
    except REPORTED as error:
        error.already_reported = dist.get_rank() != 0  # type: ignore[union-attr]  # all raise it
        raise
    except (RuntimeError, dist.DistError) as error:
        if distributed.is_lost_peer(error) or "timed out" in str(error).lower():
            raise PeerLostError("Not all processes have answered.") from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    nodes = len({finding.node for finding in findings})
    facts = ", ".join(f"{name} {value}" for name, value in own.facts.items())
    return (
        f"{nodes} {'node is' if nodes == 1 else 'nodes are'} fit: {here.size} processes, {reduced}clocks within "
        f"{max(map(abs, offsets)):.2f} s, {facts}"
    )


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _gather_shared(folder: Path) -> list[bool]:
    """Of every process, whether it can write into the first one's folder: each leaves a file, and the first looks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    token = _gather(os.urandom(8).hex())[0]
    marks = [folder / f".preflight-{token}-{number}" for number in range(size)]
    with suppress(OSError):
        marks[rank].touch()
    dist.barrier()
    found: list[Any] = [[mark.exists() for mark in marks] if rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    marks[rank].unlink(missing_ok=True)
    return found[0]


def _clock_offsets() -> list[float]:
    """Seconds by which each process's clock is ahead of the first one's; the least of several tries."""
    tries = []
    for _ in range(ROUNDS):
        dist.barrier()
        times = _gather(time.time())
        tries.append([seconds - times[0] for seconds in times])
    return [min(offsets, key=abs) for offsets in zip(*tries, strict=True)]


def _try_reduce(backend: str, here: Place, timeout: datetime.timedelta) -> str:
    """How fast all processes add up a large tensor. Raises UnfitError, in all of them, if it comes out wrong."""
    rank, size, amount = here.rank, here.size, REDUCED_BYTES[backend]
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", here.local_rank)
        torch.cuda.set_device(device)
    group = dist.new_group(backend=backend, timeout=timeout)
    values, seconds, wrong = torch.empty(amount // 4, device=device), [], 0
    for _ in range(ROUNDS):
        values.fill_(rank + 1)
        dist.barrier(group)
        begin = time.perf_counter()
        dist.all_reduce(values, group=group)
        wrong += int((values != size * (size + 1) / 2).sum())  # waits for the result
        seconds.append(time.perf_counter() - begin)
    results = _gather((node_name(), min(seconds), wrong))
    places = sorted({node for node, _, wrong in results if wrong})
    if places:
        raise UnfitError(f"An all-reduce over {backend} comes out wrong on {', '.join(places)}.")
    sent = 2 * (size - 1) / size * amount  # by each process, at the least
    speed = sent / max(slowest for _, slowest, _ in results)
    return f"all-reduce of {amount >> 20} MiB at {speed / 1e9:.2f} GB/s over {backend}, "


def _tell(unfit: dict[str, str]) -> None:
    """Let the job that started this know which nodes to leave out."""
    folder = os.environ.get(FOLDER)
    if folder and dist.get_rank() == 0:
        replace_file(Path(folder) / UNFIT_FILE, [json.dumps(unfit).encode()])
