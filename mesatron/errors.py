"""What can go wrong, each with the exit code a script can rely on (docs/exit-codes.md).

A message is one sentence: what is wrong, where, and what to do. The command line prints it without a traceback.
"""

import errno
import os
import sys
from contextlib import suppress

from mesatron_data.errors import DataError
from mesatron_data.errors import StorageError as _StorageError
from mesatron_data.files import disk_full, storage_failed


class MesatronError(Exception):
    """Base of every fault that is reported in one line; `exit_code` becomes the process's exit code."""

    exit_code = 1
    already_reported = False
    in_all_processes = False


class ConfigError(MesatronError):
    """A config file or a command line option is wrong."""

    exit_code = 2


class CheckpointError(MesatronError):
    """A checkpoint is missing, damaged or belongs to another model."""

    exit_code = 4


class NonFiniteError(MesatronError):
    """Too many optimizer steps in a row had non-finite gradients."""

    exit_code = 5


class LossSpikeError(MesatronError):
    """The loss has risen again after the run went back as often as it may, or with nothing left to go back to."""

    exit_code = 5


class MemoryExhaustedError(MesatronError):
    """The model and batch do not fit into the device's memory."""

    exit_code = 6


class DiskFullError(MesatronError):
    """There is no space left for a checkpoint, a shard or a log."""

    exit_code = 7


class PeerLostError(MesatronError):
    """Another process of the run has ended; it, or whoever killed it, knows why, so this one keeps silent."""

    exit_code = 8
    already_reported = True


class UnfitError(MesatronError):
    """A machine is not fit for the run, or not like the others."""

    exit_code = 9


class VariantError(MesatronError):
    """Variants of a comparison failed; the others were trained and measured."""

    exit_code = 10


class StorageError(MesatronError):
    """A file system does not answer as it should; it may do so at another start."""

    exit_code = _StorageError.exit_code


class StoppedEarly(MesatronError):
    """The run was asked to end before its last step; its checkpoint is saved and the same command continues it."""

    exit_code = 75


class PreemptedError(MesatronError):
    """The cluster asked the run to end; its checkpoint is saved and the same job, started again, continues it."""

    exit_code = 76


class HungError(MesatronError):
    """No step or phase has come to its end within `train.watchdog_seconds`."""

    exit_code = 77


class FencedError(MesatronError):
    """A newer attempt has taken over the run folder, into which this one must not write any more."""

    exit_code = 78


ENDED_AFTER_SAVING = (0, StoppedEarly.exit_code, PreemptedError.exit_code)
"""Exit codes of a training whose last step is saved."""
REPORTED = (MesatronError, DataError)
"""Faults with an `exit_code` that are reported in one line."""


SPEAKER = "mesatron: "
"""What begins each line that a fault or a decision is said in."""


def say(what: str) -> None:
    """Say a decision or a fault on standard error, in one line; where that cannot be written, nobody hears it."""
    with suppress(OSError):
        print(f"{SPEAKER}{' '.join(what.split())}", file=sys.stderr, flush=True)


def report(error: BaseException) -> None:
    """Say a fault, unless it has been said."""
    if not getattr(error, "already_reported", False):
        say(str(error))


def last_report(output: str) -> str | None:
    """The last line of a program's output that says a fault or a decision; None if there is none."""
    said = [line for line in output.splitlines() if line.startswith(SPEAKER)]
    return said[-1].removeprefix(SPEAKER) if said else None


NO_MORE_THREADS = ("can't start new thread", os.strerror(errno.EAGAIN))


def foreseen(error: BaseException) -> MesatronError | None:
    """The fault to report for an error of the system that a person can mend; None for any other."""
    if isinstance(error, OSError) and error.filename is not None:
        return unusable_path(error)
    if isinstance(error, OSError) and disk_full(error):
        return DiskFullError(
            f"No space left for the output or a temporary file ({error.strerror}); free some space and start the same "
            "command again."
        )
    if isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in NO_MORE_THREADS):
        return ConfigError(
            f"No more threads or processes may be started here ({error}); raise the limit (ulimit -u, or that of the "
            "container), or end others."
        )
    return None


def unusable_path(error: OSError) -> MesatronError:
    """The fault to report for a path that the system refuses to use, or whose storage has failed."""
    return refused_path(error, f"Cannot use {error.filename}: {error.strerror}", "check the path and its permissions")


def refused_path(error: OSError, what: str, advice: str) -> MesatronError:
    """The fault to report for an error of the system: a DiskFullError, StorageError, or a ConfigError with `advice`."""
    if disk_full(error):
        return DiskFullError(f"{what}; free some space and start the same command again.")
    if storage_failed(error):
        return StorageError(f"{what}; start the same command again once its storage answers.")
    return ConfigError(f"{what}; {advice}.")
