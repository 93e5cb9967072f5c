"""Which checkpoints stay: the last few, every n-th step for good, and never half a folder.

What lies under a name that no reader takes for a checkpoint may stay a while: NFS keeps a file that a process maps, and
one that was stopped may still be writing. That is no reason to end a run; the next start tries again.
"""

import os
import shutil
from pathlib import Path

from mesatron.checkpoint import format as fmt
from mesatron.checkpoint.verify import list_checkpoints


def prune(root: Path, saved_step: int, keep_last: int, keep_every_steps: int | None, attempt: str) -> list[Path]:
    """Remove complete checkpoints that are neither among the last `keep_last` up to `saved_step` nor permanent.

    saved_step: the step just saved. Newer folders come from a future that was given up when an older checkpoint was
    resumed; they neither count nor are touched. keep_every_steps: multiples of it stay for good (None: none do).
    Returns what could not be removed yet.
    """
    steps = [info for info in list_checkpoints(root) if info.status == "complete" and info.step <= saved_step]
    left = []
    for info in steps[: max(len(steps) - keep_last, 0)]:
        if keep_every_steps is None or info.step % keep_every_steps:
            try:
                left += remove(info.path, attempt)
            except OSError:  # the next save tries again
                left.append(info.path)
    return left


def remove(checkpoint: Path, attempt: str) -> list[Path]:
    """Remove a checkpoint: renamed first, so that a kill while its files go leaves no half of it under a good name.

    Returns the folder of that name if it could not be removed yet. Raises OSError when the rename fails.
    """
    return _clear(fmt.set_aside(checkpoint, ".trash", attempt))


def remove_leftovers(root: Path, attempt: str) -> list[Path]:
    """Remove what dead attempts left half written or half removed; damaged checkpoints stay.

    Call it on one rank before the first save, while no other process of the run is alive. Returns what could not be
    removed yet.
    """
    left = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = fmt.UNFINISHED_FOLDER.fullmatch(path.name)
        if match and match[3] != attempt and path.is_dir() and not path.is_symlink():
            left += _clear(path)
    return left


def _clear(folder: Path) -> list[Path]:
    """Remove as much of a folder as can be; returns it if it is still there."""
    shutil.rmtree(folder, ignore_errors=True)
    return [folder] if os.path.lexists(folder) else []
