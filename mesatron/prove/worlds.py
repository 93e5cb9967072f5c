"""Worlds of processes on this machine, forked from one server that has imported everything: seconds instead of tens."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import torch
from mesatron_data import workers
from torch.distributed import TCPStore

from mesatron.errors import MesatronError, PeerLostError, last_report
from mesatron.processes import end_with_parent

PRELOAD = ["mesatron.train.loop", "mesatron.cli", "mesatron.parallel.megatron", "mesatron.parallel.pipeline"]
KEPT_LINES = 100
"""Of the log of a process of a world that failed: the whole stack of its main thread, which comes last."""
STACK_SECONDS = 10.0
"""In which a process that did not end in time writes its stacks: milliseconds, unless the machine is very busy."""


class WorldFailed(MesatronError):
    """A process of a world has not come to its end; the message has its reason, or what it last printed."""

    logs: Sequence[Sequence[str]] = ()
    """The last lines of every process; of one that did not end in time, its stacks."""


def fork_server(*modules: str) -> ForkServerContext:
    """What worlds are forked from, with PRELOAD and `modules` imported."""
    # Asked in the usual way, whether there is a GPU, CUDA cannot be used after a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return workers.fork_server(*PRELOAD, *modules)


def run_world(
    context: ForkServerContext, size: int, arguments: list[str], folder: Path, seconds: float,
    enough: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Run `mesatron` with `arguments` in `size` processes that torchrun might have started; their words go to `folder`.

    Once `enough` says so they are killed, and with this process. Raises WorldFailed with the last words of the first
    that failed, or that did not end within `seconds`; the next world's overwrite them in `folder`.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    processes = []
    for rank in range(size):
        own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=_work, args=(own, arguments, folder / f"rank-{rank}.log"), daemon=True))
    with workers.starting():
        for process in processes:
            process.start()
    try:
        running, deadline = set(range(size)), time.monotonic() + seconds
        while running and not enough():
            left = deadline - time.monotonic()
            wait([processes[rank].sentinel for rank in running], min(max(0.0, left), 0.5))
            ended = {rank for rank in running if processes[rank].exitcode is not None}
            running -= ended
            failed = [rank for rank in ended if processes[rank].exitcode != 0] or (list(running) if left < 0 else [])
            if failed:
                rank = min(failed, key=lambda rank: processes[rank].exitcode == PeerLostError.exit_code)
                exit_code = processes[rank].exitcode
                how = f"did not end in {seconds:g} s" if exit_code is None else f"ended with {exit_code}"
                error = WorldFailed(f"Process {rank} of {size} {how}: {_last_words(folder, rank, size)}")
                if exit_code is None:
                    _abort([processes[rank] for rank in running])
                error.logs = [_log(folder, rank).splitlines()[-KEPT_LINES:] for rank in range(size)]
                raise error
    finally:
        for process in processes:
            process.kill()
            process.join()


def _abort(processes: Sequence[ForkServerProcess]) -> None:
    """Have each write its stacks to its log."""
    for process in processes:
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGABRT)
    until = time.monotonic() + STACK_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))


def _log(folder: Path, rank: int) -> str:
    log = folder / f"rank-{rank}.log"
    return log.read_text(errors="replace").strip() if log.exists() else ""


def _last_words(folder: Path, failed: int, size: int) -> str:
    """Why process `failed` did, by itself or, where all have a fault, by the one that says it; else its last line."""
    texts = [_log(folder, rank) for rank in (failed, *range(size))]
    said = [words for words in map(last_report, texts) if words]
    return (said or texts[0].splitlines()[-1:] or ["it printed nothing"])[0]


def _work(variables: dict[str, str], arguments: list[str], log: Path) -> None:
    # The fork server ends with the process that runs the world, but not while a worker holds that one's end of a pipe.
    end_with_parent()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    os.environ |= variables
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort is for the stacks, not for gigabytes of memory on disk
    torch.set_num_threads(1)
    sys.argv = ["mesatron", *arguments]
    from mesatron.cli import main

    main()
