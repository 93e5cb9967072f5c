"""The shared memory and lock files that `streaming.StreamingDataset` keeps per host: released on close, removed after a
crash.

streaming 0.13 names the segments of its n-th open dataset on a host /dev/shm/00000n_<name> and its lock files likewise
in the temporary folder. It frees segments only when the process ends in good order, and never removes the lock files.
Each process of ours that uses the segments holds a lock on one more file beside them, which ends with the process.
"""

import atexit
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mesatron_data.mosaic import streaming

SEGMENTS = Path("/dev/shm")
SEGMENT_NAMES = streaming.base.constant.SHM_TO_CLEAN
LOCK_NAMES = (streaming.base.constant.BARRIER_FILELOCK, streaming.base.constant.CACHE_FILELOCK)
LOCALS = streaming.base.constant.LOCALS
IN_USE = "mesatron"


def hold(dataset: "streaming.StreamingDataset") -> int:
    """Mark the segments of a dataset as used by this process; returns the descriptor to give to `release`."""
    # streaming refuses a cache folder that another run has open, unless that run's lock file exists. Sharing is safe:
    # files are put in place by renaming and are checked before use.
    Path(dataset._cache_filelock_path).touch()
    in_use = os.open(SEGMENTS / f"{dataset._shm_prefix_int:06}_{IN_USE}", os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.flock(in_use, fcntl.LOCK_SH)
    return in_use


def release(dataset: "streaming.StreamingDataset", in_use: int) -> None:
    """Free this process's segments and lock files of a dataset that it will not use again."""
    held = [
        dataset._locals_shm,
        dataset._shared_barrier._arr.shm,
        dataset._next_epoch.arr.shm,
        dataset._cache_usage.arr.shm,
        dataset._shard_states.shm,
        dataset._shard_access_times.shm,
    ]
    for shared_memory in held:
        atexit.unregister(shared_memory.cleanup)
        shared_memory.cleanup()
    _remove_locks(f"{dataset._shm_prefix_int:06}")
    os.close(in_use)


def remove_stale(local_folder: Path) -> None:
    """Remove what dead processes of this user left for `local_folder`, and lock files that belong to no segment.

    Call it on one process of a host while no other process of the run opens a dataset.
    """
    for segment in _own(SEGMENTS, LOCALS):
        prefix = segment.name.removesuffix(f"_{LOCALS}")
        if str(local_folder).encode() + b"\0" in segment.read_bytes() and not _in_use(prefix):
            for name in SEGMENT_NAMES:
                (SEGMENTS / f"{prefix}_{name}").unlink(missing_ok=True)
    for folder, name in ((SEGMENTS, IN_USE), *((Path(tempfile.gettempdir()), name) for name in LOCK_NAMES)):
        for lock in _own(folder, name):
            prefix = lock.name.removesuffix(f"_{name}")
            if not (SEGMENTS / f"{prefix}_{LOCALS}").exists():
                _remove_locks(prefix)


def _in_use(prefix: str) -> bool:
    """Whether a live process uses the segments of this prefix."""
    try:
        in_use = os.open(SEGMENTS / f"{prefix}_{IN_USE}", os.O_RDONLY)
    except FileNotFoundError:
        # Not ours, or its process is just about to call `hold`, or died before it did.
        return _mapped(SEGMENTS / f"{prefix}_{LOCALS}")
    try:
        fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(in_use)
    return False


def _own(folder: Path, name: str) -> Iterator[Path]:
    for path in folder.glob(f"[0-9][0-9][0-9][0-9][0-9][0-9]_{name}"):
        try:
            if path.stat().st_uid == os.getuid():
                yield path
        except FileNotFoundError:
            continue  # its owner removed it meanwhile


def _mapped(segment: Path) -> bool:
    """Whether a live process of this user has the segment mapped, be it only to look which prefixes are taken."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            # An earlier segment of the same name that was removed ends with "(deleted)".
            if any(line.endswith(str(segment)) for line in maps.read_text().splitlines()):
                return True
        except OSError:
            continue  # another user's process, or one that has just ended
    return False


def _remove_locks(prefix: str) -> None:
    for name in LOCK_NAMES:
        (Path(tempfile.gettempdir()) / f"{prefix}_{name}").unlink(missing_ok=True)
    (SEGMENTS / f"{prefix}_{IN_USE}").unlink(missing_ok=True)
