"""`mesatron launch`: runs as jobs of a cluster. The scripts under launchers/ call the hidden verbs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mesatron.errors import ConfigError
from mesatron.terminal import ConfigFile, Overrides, RunFolder

ONE_TASK = "a node has one task, in which torchrun starts its processes; set launch.processes_per_node"
DECIDED = {
    "job-name": "a job has the name of its run",
    "output": "it lies in the run folder",
    "chdir": "a job works where it is submitted",
    "signal": "set launch.stop_signal and launch.lead_seconds",
    "array": "the runs of a sweep or a comparison are one",
    **dict.fromkeys(("ntasks", "ntasks-per-gpu", "ntasks-per-node", "tasks-per-node"), ONE_TASK),
}
"""Options of sbatch that a submission sets by itself, and what stands for them."""

launch_app = typer.Typer(no_args_is_help=True, help="Run on a cluster.")


@launch_app.command("slurm")
def slurm(
    file: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")] = 1,
    partition: Annotated[str | None, typer.Option(help="As sbatch has it; so are the next ones.")] = None,
    account: Annotated[str | None, typer.Option()] = None,
    qos: Annotated[str | None, typer.Option()] = None,
    time: Annotated[str | None, typer.Option()] = None,
    gpus_per_node: Annotated[str | None, typer.Option()] = None,
    gres: Annotated[str | None, typer.Option()] = None,
    cpus_per_task: Annotated[str | None, typer.Option()] = None,
    dependency: Annotated[str | None, typer.Option()] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Any other option of sbatch; may be repeated.")
    ] = None,
    container_image: Annotated[str | None, typer.Option(help="As pyxis has it; so are the next two.")] = None,
    container_mounts: Annotated[str | None, typer.Option()] = None,
    container_workdir: Annotated[str | None, typer.Option()] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="A run for each value, or combination; may be repeated.")
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Go on although settings that alter the result changed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and print the script; write nothing.")] = False,
) -> None:
    """Check a config against what is asked of Slurm, put code, config and script into the run folder, and submit."""
    from mesatron.cluster.submission import Request, plan, submit

    options = {
        "nodes": str(nodes), "partition": partition, "account": account, "qos": qos, "time": time,
        "gpus-per-node": gpus_per_node, "gres": gres, "cpus-per-task": cpus_per_task, "dependency": dependency,
    } | sbatch_options(sbatch)  # fmt: skip
    container = {
        "container-image": container_image, "container-mounts": container_mounts,
        "container-workdir": container_workdir,
    }  # fmt: skip
    request = Request(_given(options), _given(container), allow_changes)
    planned = plan(file, overrides or [], sweep or [], request)
    if dry_run:
        typer.echo(planned.files[planned.script], nl=False)
        return
    typer.echo(f"job {submit(planned)}")
    for folder in planned.run_folders:
        typer.echo(folder)


@launch_app.command("status")
def status(run_folder: RunFolder) -> None:
    """A run's job, how far it is, and what was decided on the way; of a sweep's folder, the job of each run."""
    from mesatron.cluster.control import status

    for name, value in status(run_folder):
        typer.echo(f"{name:<11}{value}")


@launch_app.command("stop")
def stop(run_folder: RunFolder) -> None:
    """Let a run, or each of a sweep's folder, save at its next step and end; cancel a job that waits."""
    from mesatron.cluster.control import stop

    for sentence in stop(run_folder):
        typer.echo(sentence)


@launch_app.command("resume")
def resume(run_folder: RunFolder) -> None:
    """Submit a run that has ended again, as it was submitted before; release its job if Slurm holds it."""
    from mesatron.cluster.submission import resume

    typer.echo(resume(run_folder))


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


def sbatch_options(given: Sequence[str] | None) -> dict[str, str]:
    """What is given as `--sbatch NAME=VALUE`. Raises ConfigError for what is not of that form, or not to be given."""
    options = dict(option.partition("=")[::2] for option in given or [])
    if not all(name and value for name, value in options.items()):
        raise ConfigError("--sbatch takes NAME=VALUE, such as --sbatch constraint=h100.")
    if not re.fullmatch("[1-9][0-9]*", options.get("nodes", "1")):
        raise ConfigError(f"--sbatch nodes={options['nodes']} is no number of nodes; give 1 or more.")
    for name, value in options.items():
        if name in DECIDED and (name, value) != ("ntasks-per-node", "1"):  # which the script says too
            raise ConfigError(f"--sbatch {name}={value} cannot be given: {DECIDED[name]}.")
    return options


def _given(options: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}


def _print_variables(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        typer.echo(f"{name}={shlex.quote(value)}")
