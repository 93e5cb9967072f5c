"""The curves of a comparison for TensorBoard: one folder a variant, so that they lie over one another."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from mesatron.compare.results import Result
from mesatron.files import reporting_full_disk


def write_board(folder: Path, names: Sequence[str], results: Sequence[Result], reference: Result | None) -> None:
    """Write the event files of all variants, called `names`, in `folder` anew; other folders there stay.

    What is by position has the position, counted from 0, as its step.
    """
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
    for result in results:
        with reporting_full_disk(folder), SummaryWriter(str(folder / result.name)) as board:
            for tag, curve in {"train/loss": result.train_loss, "validation/loss": result.validation_loss}.items():
                for step, loss in curve:
                    board.add_scalar(tag, loss, step)
            by_position = {"position/loss": result.loss_by_position}
            if reference is not None:
                by_position["position/difference"] = result.difference(reference)
            for tag, losses in by_position.items():
                for position, value in enumerate(losses):
                    if value is not None:
                        board.add_scalar(tag, value, position)
            last_step = result.train_loss[-1][0]
            board.add_scalar("compare/perplexity", result.perplexity, last_step)
            board.add_scalar("compare/tokens_per_second", result.tokens_per_second, last_step)
            board.add_scalar("compare/peak_memory_bytes", result.peak_bytes, last_step)
