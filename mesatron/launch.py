"""Start several training processes on this machine, as torchrun does, and keep their exit code."""

from __future__ import annotations

import logging
import os
import sys

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch_local(processes: int, arguments: list[str]) -> int:
    """Run `mesatron` with `arguments` in `processes` processes of one world; returns 0 or the first failure's code.

    torchrun itself answers 1 to every failure, after a page of its own words; the reason is in the worker's one line.
    """
    # The agent logs each worker's end with a traceback of its own; the worker has already said why.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # One thread per process unless asked for otherwise: more would contend for the same cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        run_id=f"mesatron-{os.getpid()}", max_restarts=0, monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(os.devnull),  # else every start leaves an empty folder in the temporary one
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "mesatron", *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return 128 - code if code < 0 else code  # as a shell tells of a signal
    return 0
