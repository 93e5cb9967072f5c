"""`mesatron doctor`: is this machine fit, and what will a run use on it?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mesatron.errors import ConfigError

PATIENCE, UNLIMITED_SECONDS = 0.75, 120
"""Processes wait for each other that part of `launch.preflight_seconds`, or of so many seconds if it is 0."""

doctor_app = typer.Typer(no_args_is_help=True, help="Examine this machine.")


@doctor_app.command("run")
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Config file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
) -> None:
    """Examine the nodes of a run together: GPUs, versions, kernels, network, clocks, space, data, run folder.

    Start it as the training is started: by torchrun on all nodes (launchers/slurm does), or alone for this machine.
    """
    from mesatron.config import load_config

    config = load_config(file, overrides or [])
    from mesatron.cluster.preflight import run

    summary = run(config, PATIENCE * (config.launch.preflight_seconds or UNLIMITED_SECONDS))
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"preflight  {summary}")


@doctor_app.command("kernels")
def kernels(
    again: Annotated[bool, typer.Option("--again", help="Check again although the result is known.")] = False,
) -> None:
    """Check every gradient of the Mesa kernels on this GPU against float64, and say which kernels a run will use."""
    import torch
    from mesatron_kernels import resolve
    from mesatron_kernels.selfcheck import selfcheck
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not torch.cuda.is_available():
        typer.echo("There is no GPU here: the Mesa operator will run with the torch implementation.")
        return
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Triton cannot be imported ({error}), so the Mesa operator runs with the slow torch implementation; "
            "install the Triton that belongs to this torch."
        ) from None
    found = selfcheck(force=again)
    typer.echo("  ".join(f"{name} {value}" for name, value in found.machine.items()))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("dtype", "head size", "largest error", "of", "seconds", "auto takes", "why"):
        table.add_column(heading, overflow="fold")
    for pair in found.pairs:
        worst = max(pair.errors, key=lambda name: pair.errors[name], default="")
        choice = resolve("auto", "cuda", getattr(torch, pair.dtype), pair.head_size)
        figure = f"{pair.errors[worst]:.1e}" if worst else ""
        table.add_row(
            pair.dtype, str(pair.head_size), figure, worst, f"{pair.seconds:.1f}", choice.implementation, choice.reason
        )  # fmt: skip
    Console().print(table)
    if not found.passed:
        bad = ", ".join(f"{pair.dtype} with heads of {pair.head_size}" for pair in found.pairs if pair.failure)
        raise ConfigError(
            f"The Mesa kernels are wrong on this GPU for {bad}, which will run with the slow torch implementation; "
            "another version of Triton may help."
        )
