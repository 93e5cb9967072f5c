"""`mesatron launch`: runs as jobs of a cluster. The scripts under launchers/ call the hidden verbs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

launch_app = typer.Typer(no_args_is_help=True, help="Run on a cluster.")

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="Config file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides such as train.peak_lr=3e-3.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]


@launch_app.command("begin", hidden=True)
def begin(file: ConfigFile, overrides: Overrides = None) -> None:
    """In a job's batch script: where its processes meet, as shell variables."""
    from mesatron.cluster import job
    from mesatron.config import load_config

    _print_variables(job.begin(load_config(file, overrides or [])))


@launch_app.command("node", hidden=True)
def node(endpoint: Annotated[str, typer.Argument(metavar="ADDRESS:PORT")]) -> None:
    """On a node of a job: its own address and network interface on the way to the first node, as shell variables."""
    from mesatron.cluster.network import node_variables

    _print_variables(node_variables(endpoint))


@launch_app.command("request-stop", hidden=True)
def request_stop(run_folder: RunFolder, attempt: Annotated[int, typer.Option()]) -> None:
    """In a job's batch script: the cluster has asked it to end."""
    from mesatron.cluster.request import FOR_CLUSTER, request_stop

    request_stop(run_folder, "the cluster asked the job to end", FOR_CLUSTER, attempt)


@launch_app.command("settle", hidden=True)
def settle(file: ConfigFile, overrides: Overrides = None) -> None:
    """At the end of a job's batch script: queue it again, or leave with the training's exit code."""
    from mesatron.cluster import job
    from mesatron.config import load_config

    sys.exit(job.settle(load_config(file, overrides or [])))


def _print_variables(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        typer.echo(f"{name}={shlex.quote(value)}")
