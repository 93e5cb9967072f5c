"""What the verbs of the command line share: arguments and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="Config file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides such as train.peak_lr=3e-3.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
RunOrCheckpoint = Annotated[Path, typer.Argument(metavar="PATH", help="Run folder or checkpoint folder.")]


def table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows with their columns aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
