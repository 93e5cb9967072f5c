"""What the verbs of the command line share: arguments, bars and tables."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="Config file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides such as train.peak_lr=3e-3.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
RowSeconds = Annotated[float, typer.Option("--seconds", min=1.0, help="What one layout may take.")]
Workers = Annotated[
    int, typer.Option(
        "--workers", min=1, default_factory=lambda: len(os.sched_getaffinity(0)), show_default="every core",
        help="Processes to use.",
    )
]  # fmt: skip
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
RunOrCheckpoint = Annotated[Path, typer.Argument(metavar="PATH", help="Run folder or checkpoint folder.")]


def open_streams() -> None:
    """Have the three standard streams open, the closed ones on nothing, and able to show any text.

    The next file that is opened would have the number of a closed one, and be given what libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of the numbers they take
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale may lack letters; standard error does so already


@contextmanager
def bars() -> Iterator[Callable[[str, int, int, str], None]]:
    """Bars on a terminal, and what moves them on, called with the name of a step, how much is done of how much, and
    figures to show; elsewhere a line every minute. What `print` shows meanwhile stands above them: not so typer.echo,
    which goes around what they put in the place of the streams."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    text = TextColumn("{task.description:<8} {task.fields[figures]}")
    spoken = time.monotonic()
    with Progress(
        text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), console=console,
        disable=not console.is_terminal, redirect_stdout=sys.stdout.isatty(),
    ) as shown:  # fmt: skip
        ids: dict[str, TaskID] = {}

        def show(step: str, done: int, total: int, figures: str) -> None:
            nonlocal spoken
            if step not in ids:
                ids[step] = shown.add_task(step, total=total, figures=figures)
            shown.update(ids[step], completed=done, figures=figures)
            if not console.is_terminal and time.monotonic() > spoken + 60:
                spoken = time.monotonic()
                typer.echo(f"{step} {done / max(1, total):.1%}, {figures}", err=True)

        yield show


def table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows with their columns aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, whose first row is its heading; all columns but the first are numbers."""
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [[cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])] for cells in rows]
    return [f"| {' | '.join(cells)} |" for cells in (padded[0], rule, *padded[1:])]
