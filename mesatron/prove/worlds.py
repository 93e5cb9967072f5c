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

from mesatron.errors import MesatronError, PeerLostError, last_report

PRELOAD = ["mesatron.train.loop", "mesatron.cli", "mesatron.parallel.megatron", "mesatron.parallel.pipeline"]


class WorldFailed(MesatronError):
    """A process of a world has not come to its end; the message has its reason, or what it last printed."""


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
    not end in time; the next world's overwrite them in `folder`.
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
                exit_code = processes[rank].exitcode
                how = "did not end" if exit_code is None else f"ended with {exit_code}"
                raise WorldFailed(f"Process {rank} of {size} {how}: {_last_words(folder, rank, size)}")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _last_words(folder: Path, failed: int, size: int) -> str:
    """Why process `failed` did, by itself or, where all have a fault, by the one that says it; else its last line."""
    logs = [folder / f"rank-{rank}.log" for rank in (failed, *range(size))]
    texts = [log.read_text(errors="replace").strip() if log.exists() else "" for log in logs]
    said = [words for words in map(last_report, texts) if words]
    return (said or texts[0].splitlines()[-1:] or ["it printed nothing"])[0]


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
