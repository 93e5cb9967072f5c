"""Spread a function over processes of this machine."""

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.util import get_temp_dir
from typing import TypeVar

from mesatron_data.errors import DataError, DiskFullError
from mesatron_data.files import disk_full

Job = TypeVar("Job")
Result = TypeVar("Result")

JOBS_AHEAD = 2
"""Jobs that are with each process: one it is at, and the next."""
LONGEST_TEMPORARY_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""In bytes: the address of a Unix socket has 107, and multiprocessing gives its sockets such names in there."""


class Workers:
    """Calls functions in `processes` processes, or in this one where that is 1; made by `open_workers`."""

    def __init__(self, executor: ProcessPoolExecutor | None, processes: int) -> None:
        self._executor = executor
        self._under_way = JOBS_AHEAD * processes

    def map(
        self, function: Callable[[Job], Result], jobs: Sequence[Job], done: Callable[[Job, Result], None]
    ) -> list[Result]:
        """Return function(job) of each job in the jobs' order; `done` is called here as each comes to its end.

        Raises what `function` raised, and DataError when a process was killed.
        """
        results: dict[int, Result] = {}
        for number, result in self.as_completed(function, jobs):
            results[number] = result
            done(jobs[number], result)
        return [results[number] for number in range(len(jobs))]

    def as_completed(self, function: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[tuple[int, Result]]:
        """Yield number and function(job) of each job as it comes to its end; a job is taken from `jobs` when it is soon
        begun, and no sooner."""
        if self._executor is None:
            for number, job in enumerate(jobs):
                yield number, function(job)
            return
        running: dict[Future[Result], int] = {}
        for number, job in enumerate(jobs):
            with starting():
                running[self._executor.submit(function, job)] = number
            while len(running) >= self._under_way:
                yield from _take(running)
        while running:
            yield from _take(running)


def fork_server(*modules: str) -> ForkServerContext:
    """What processes are forked from, with `modules` imported; it ends with this process.

    Its sockets are in the temporary folder, or in /tmp where that one's path is too long for them.
    """
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPORARY_FOLDER:
        usual, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            get_temp_dir()  # makes the folder of all sockets of this process and of those that it starts
        finally:
            tempfile.tempdir = usual
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    return context


def _take(running: dict[Future[Result], int]) -> Iterator[tuple[int, Result]]:
    """Wait for one of the jobs at least."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        yield running.pop(future), future.result()


@contextmanager
def starting() -> Iterator[None]:
    """Turn what multiprocessing raises when a process cannot be started into a DataError or DiskFullError."""
    try:
        yield
    except (OSError, EOFError) as error:  # the latter when the fork server has failed
        kind = DiskFullError if disk_full(error) else DataError
        raise kind(
            f"Cannot start worker processes ({error}); see that /dev/shm and {tempfile.gettempdir()} have space, and "
            "that the limits of open files and of processes (ulimit -n, -u) allow for more."
        ) from error


@contextmanager
def open_workers(processes: int, module: str) -> Iterator[Workers]:
    """Start `processes` processes, with `module` imported once for all of them; when the block fails or this process
    ends, however it ends, so do they."""
    if processes == 1:
        yield Workers(None, 1)
        return
    context = fork_server(module)
    here, there = context.Pipe(duplex=False)
    with starting():
        executor = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(here, dict(os.environ)))
    try:
        yield Workers(executor, processes)
        executor.shutdown()
    except BrokenProcessPool as error:
        raise DataError(
            "A worker process was killed, most likely for lack of memory: start the same command again with fewer "
            "workers."
        ) from error
    finally:
        there.close()
        executor.shutdown(cancel_futures=True)
        here.close()


def _begin(pipe: Connection, environment: dict[str, str]) -> None:
    """Make this process end when the other end of `pipe` is closed (Ctrl-C reaches it by that way alone), and give it
    the variables of the process that wants it: the server that it was forked from may be older than they are."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        pipe.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
