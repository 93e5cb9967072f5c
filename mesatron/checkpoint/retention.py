"""Which checkpoints stay: the last few, every n-th step for good, and never half a folder."""

import shutil
from pathlib import Path

from mesatron.checkpoint import format as fmt
from mesatron.checkpoint.verify import list_checkpoints


def prune(root: Path, saved_step: int, keep_last: int, keep_every_steps: int | None, attempt: str) -> list[Path]:
    """Remove complete checkpoints that are neither among the last `keep_last` up to `saved_step` nor permanent.

    saved_step: the step just saved. Newer folders come from a future that was given up when an older checkpoint was
    resumed; they neither count nor are touched. keep_every_steps: multiples of it stay for good (None: none do).
    Returns the folders removed.
    """
    steps = [info for info in list_checkpoints(root) if info.status == "complete" and info.step <= saved_step]
    removed = []
    for info in steps[: max(len(steps) - keep_last, 0)]:
        if keep_every_steps is None or info.step % keep_every_steps:
            remove(info.path, attempt)
            removed.append(info.path)
    return removed


def remove(checkpoint: Path, attempt: str) -> None:
    """Remove a checkpoint: renamed first, so that a kill while its files go leaves no half of it under a good name."""
    shutil.rmtree(fmt.set_aside(checkpoint, ".trash", attempt))


def remove_leftovers(root: Path, attempt: str) -> list[Path]:
    """Remove what dead attempts left half written or half removed, and return it; damaged checkpoints stay.

    Call it on one rank before the first save, while no other process of the run is alive.
    """
    removed = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = fmt.UNFINISHED_FOLDER.fullmatch(path.name)
        if match and match[3] != attempt and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            removed.append(path)
    return removed
