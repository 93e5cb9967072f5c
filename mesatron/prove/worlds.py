"""Worlds of processes on this machine, forked from one server that has imported everything: seconds instead of tens."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch
from torch.distributed import TCPStore

from mesatron.errors import MesatronError, PeerLostError

PRELOAD = ["mesatron.train.loop", "mesatron.cli", "mesatron.parallel.megatron", "mesatron.parallel.pipeline"]


class WorldFailed(MesatronError):
    """A process of a world has not come to its end; the message says what it last printed."""


def fork_server(*modules: str) -> ForkServerContext:
    """What worlds are forked from, with PRELOAD and `modules` imported; it ends with this process."""
    # Asked in the usual way, whether there is a GPU, CUDA cannot be used after a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *modules])
    return context


def run_world(
    context: ForkServerContext, size: int, arguments: list[str], folder: Path, seconds: float = 900,
    enough: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Run `mesatron` with `arguments` in `size` processes that torchrun might have started; their words go to `folder`.

    Once `enough` says so they are killed. Raises WorldFailed with the last words of the first that failed, or that did
    not end in time.
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
                log, exit_code = folder / f"rank-{rank}.log", processes[rank].exitcode
                words = log.read_text().strip().splitlines()[-1:] if log.exists() else []
                how = "did not end" if exit_code is None else f"ended with {exit_code}"
                raise WorldFailed(f"Process {rank} of {size} {how} ({' '.join(words)}); see {folder}.")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work(variables: dict[str, str], arguments: list[str], log: Path) -> None:
    os.environ |= variables
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    torch.set_num_threads(1)
    sys.argv = ["mesatron", *arguments]
    from mesatron.cli import main

    main()
