"""Start several training processes on this machine, as torchrun does, and keep their exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mesatron.errors import PeerLostError, say
from mesatron.parallel.distributed import LAUNCHER_PID

AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SIGNAL_BASE = 128  # a shell's exit code for a process that a signal ended


def launch_local(processes: int, arguments: list[str], stop_signals: Collection[signal.Signals]) -> int:
    """Run `mesatron` with `arguments` in `processes` processes of one world; returns 0 or the exit code of the cause.

    torchrun itself answers 1 to every failure, after a page of its own words; the reason is in the worker's one line.
    Stop signals are handed on to the workers, which take as long as they need to save.
    """
    # The agent logs each worker's end with a traceback of its own; the worker has already said why.
    logging.disable(logging.ERROR)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    # The processes share the cores evenly unless asked for otherwise: more threads would contend for them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        run_id=f"mesatron-{os.getpid()}", max_restarts=0, monitor_interval=0.1,
        # It ends workers 30 s after a signal that it handles itself.
        signals_to_handle=",".join(number.name for number in AGENT_SIGNALS if number not in stop_signals),
        logs_specs=DefaultLogsSpecs(os.devnull),  # else every start leaves an empty folder in the temporary one
    )  # fmt: skip
    for number in stop_signals:
        signal.signal(number, _hand_on)
    return exit_code(lambda: elastic_launch(config, sys.executable)("-m", "mesatron", *arguments))


def exit_code(launch: Callable[[], object]) -> int:
    """Start workers of this machine by torchrun's `launch` and wait; returns 0 or the exit code of the cause.

    The one that failed has said why, unless a signal ended it, which is said here.
    """
    try:
        launch()
    except ChildFailedError as error:
        rank, cause = min(error.failures.items(), key=lambda item: _is_consequence(item[1]))
        if cause.exitcode < 0:
            name = signal.Signals(-cause.exitcode).name
            say(f"process {rank} was ended by {name}; started again, the run goes on from its last checkpoint.")
            return SIGNAL_BASE - cause.exitcode
        return cause.exitcode
    except SignalException as interrupt:  # passed on to the workers, of which the first one has reported it
        return SIGNAL_BASE + interrupt.sigval
    return 0


def _hand_on(number: int, _: FrameType | None) -> None:
    workers = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    if not workers:
        raise SignalException(f"{signal.Signals(number).name} came before the workers", signal.Signals(number))
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, number)


def _is_consequence(failure: ProcessFailure) -> tuple[bool, int]:
    """Sorts last the processes that ended because another one had, by themselves or by the agent's SIGTERM."""
    return failure.exitcode in (PeerLostError.exit_code, -signal.SIGTERM), failure.timestamp
