"""The processes of a run: who this one is, and how all of them agree."""

from __future__ import annotations

import datetime
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from mesatron.errors import REPORTED, ConfigError, HungError, MesatronError, PeerLostError, report
from mesatron.processes import end_with_parent

T = TypeVar("T")

LAUNCHER_PID = "MESATRON_LAUNCHER_PID"
"""Environment variable by which `mesatron.launch` tells its workers who started them."""

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """This process among all processes of the run.

    store: where they met. numbers: for what they do there, each the next one at the same point.
    """

    rank: int
    size: int
    device: torch.device
    store: dist.Store = field(default_factory=dist.HashStore)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every process."""
        if self.size > 1:
            dist.barrier()

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all processes, in float64."""
        total = torch.tensor(values, dtype=torch.float64)  # on the host, so that no GPU work is waited for
        if self.size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def max(self, value: int) -> int:
        """The largest value of any process."""
        largest = torch.tensor(value)
        if self.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def gather(self, value: T) -> list[T]:
        """The `value` of every process, in the first one; nothing in the others."""
        values: list[Any] = [None] * self.size if self.is_first else []
        dist.gather_object(value, values if self.is_first else None)
        return values

    def raised_by_all(self, error: MesatronError) -> MesatronError:
        """`error`, which every process raises at this point: the first one reports it, and all can still meet."""
        if self.is_first:
            report(error)
        error.already_reported = error.in_all_processes = True
        return error

    def from_first(self, decide: Callable[[], T], alive: Callable[[], None] | None = None) -> T:
        """What `decide` returns in the first process, in every process; a reported fault of it is raised in all.

        It may take as long as a collective may, with `alive` any time: the others call that as they wait.
        """
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = decide()
            except REPORTED as error:
                outcome[1] = error
            except Exception:
                outcome[1] = PeerLostError("The first process has failed.")
                self._share(outcome, alive)
                raise
        self._share(outcome, alive)
        value, fault = outcome
        if isinstance(fault, PeerLostError):
            raise fault
        if fault is not None:
            raise self.raised_by_all(fault)
        return value

    def _share(self, outcome: list[Any], alive: Callable[[], None] | None) -> None:
        """Put the first process's `outcome` in place in the others."""
        if self.size == 1:
            return
        if alive:
            key, begin = f"decision {next(self.numbers)}", time.monotonic()
            if self.is_first:
                self.store.set(key, "")
            while not self.store.check([key]):
                alive()
                time.sleep(min(1.0, 0.01 + (time.monotonic() - begin) / 10))
        dist.broadcast_object_list(outcome, src=0)


def start(patience_seconds: float = 0.0) -> World:
    """Join the processes that torchrun started, or be the only one; returns this process's place.

    gloo on CPUs; on GPUs NCCL for device tensors and gloo for host ones, for one process too. Raises ConfigError as
    `place` and where a process has no GPU, and HungError when one has not come within `patience_seconds` (0:
    COLLECTIVE_TIMEOUT).
    """
    patience_seconds = patience_seconds or COLLECTIVE_TIMEOUT.total_seconds()
    rank, size, local_rank, _ = place()
    if size == 1:  # DeepSpeed reads these itself
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    _end_with_launcher()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")  # so many collectives are remembered for the watchdog
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"Local rank {local_rank} has no GPU: {torch.cuda.device_count()} are visible; start fewer processes."
            )
        device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    try:
        # A process alone needs no port: a store in memory cannot collide with another run on the machine.
        store = dist.HashStore() if size == 1 else _meet(rank, size, patience_seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    except (dist.DistError, ValueError) as error:  # the latter for an address that is none
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"Process {rank} cannot meet the {size - 1} others at {address} ({' '.join(str(error).split())[:200]}); "
            "check that all nodes reach that address."
        ) from None
    return World(rank, size, device, store)


def variable(name: str, default: int) -> int:
    """The number that a launcher has put into an environment variable; `default` where there is none.

    Raises ConfigError when it is none.
    """
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r}, no number; unset it, or start the processes with torchrun.")
    return int(value)


class Place(NamedTuple):
    """A process's number among all processes, and among those of its node; its number there is that of its GPU."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def place() -> Place:
    """This process's place, as a launcher has put it into the environment; that of one alone without a launcher.

    Raises ConfigError for what no launcher puts there, and when a part is missing: a guessed LOCAL_RANK would put all
    processes of a node on one GPU.
    """
    rank, size = variable("RANK", 0), variable("WORLD_SIZE", 1)
    if rank >= size:
        raise ConfigError(f"RANK is {rank} but WORLD_SIZE {size}; unset both, or start the processes with torchrun.")
    if size == 1:
        if variable("SLURM_STEP_NUM_TASKS", 1) > 1:
            raise ConfigError(
                f"srun has started {os.environ['SLURM_STEP_NUM_TASKS']} processes that know nothing of each other; let "
                "it start one torchrun on each node, as launchers/slurm/train.sbatch does."
            )
        return Place(0, 1, 0, 1)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(f"WORLD_SIZE is {size} but {name} is not set; start the processes with torchrun.")
    return Place(rank, size, variable("LOCAL_RANK", 0), variable("LOCAL_WORLD_SIZE", 1))


def node_key(rank: int) -> str:
    """Under which the name of a process's node lies in the store of a world of several."""
    return f"node of process {rank}"


def _meet(rank: int, size: int, patience_seconds: float) -> dist.Store:
    """The store of all processes, at the address that the launcher gave, once all have come."""
    patience = datetime.timedelta(seconds=patience_seconds)
    store, *_ = next(dist.rendezvous("env://", rank, size, timeout=patience))
    store.set_timeout(COLLECTIVE_TIMEOUT)
    store.set(node_key(rank), os.uname().nodename)
    if store.add("processes here", 1) == size:
        store.set("all here", "")
    begin = time.monotonic()
    while not store.check(["all here"]):
        waited = time.monotonic() - begin
        if waited > patience_seconds:
            missing = [other for other in range(size) if not store.check([node_key(other)])]
            ranks = f"{', '.join(map(str, missing[:8]))}{' ...' if len(missing) > 8 else ''}"
            error = HungError(
                f"{len(missing)} of {size} processes have not come within {patience_seconds:g} s (ranks {ranks}); see "
                "what keeps them on their nodes, and start the same job again."
            )
            error.already_reported = any(other not in missing for other in range(rank))
            raise error
        time.sleep(min(1.0, 0.01 + waited / 10))
    return store


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process has ended, or an error was raised because of that."""
    if error.__cause__ is not None and is_lost_peer(error.__cause__):
        return True
    from_gloo = isinstance(error, RuntimeError) and re.search(r"gloo/.*([Cc]onnection|[Tt]imed out)", str(error))
    return bool(from_gloo) or isinstance(error, dist.DistError)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _end_with_launcher() -> None:
    """Ask Linux to kill this worker when the torchrun above it dies, or it would train on with nobody watching.

    Raises PeerLostError when a launcher of ours has died before: the rendezvous would wait for it for half an hour.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with_parent()
    if os.environ.get(LAUNCHER_PID, str(os.getppid())) != str(os.getppid()):
        raise PeerLostError("The launcher has ended.")
