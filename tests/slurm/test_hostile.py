"""Clusters that are not as they should be: a job finds its way all the same, or ends with one line that says why."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from slurm_training import SCRIPT, Training, environment

Make = Callable[..., Training]


def test_outside_of_slurm(tmp_path: Path, tiny_config: Callable) -> None:
    variables = {name: value for name, value in environment(tmp_path / "t").items() if not name.startswith("SLURM_")}
    done = subprocess.run(["bash", SCRIPT, tiny_config(tmp_path)], capture_output=True, text=True, env=variables)
    assert done.returncode == 2
    assert done.stderr == "mesatron: SLURM_JOB_ID is not set; submit the script with sbatch.\n"


def test_without_scontrol_nothing_is_guessed(training: Make, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "srun"):
        (programs / name).symlink_to(str(shutil.which(name)))
    run = training()
    run.submit(variables={"PATH": f"{Path(sys.executable).parent}:{programs}"})
    job = run.cluster.wait_for_state(run.job)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0"), run.text()
    assert "scontrol is not on PATH of n1" in run.text()


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        (["--ntasks-per-node=2"], (), "The job has 2(x2) tasks per node, but one torchrun on each"),
        ([], ("train.micro_batch_size=8",), "8 is no multiple of 8 x 2 = 16"),
        (["--gpus-per-node=2"], ("parallel.tensor_size=3",), "model.heads must be a multiple of parallel.tensor_size"),
        (["--gpus-per-node=2"], ("parallel.data_size=3",), "calls for 3 processes, not 4"),
    ],
)
def test_a_job_of_the_wrong_shape_ends_at_once(
    training: Make, options: list[str], overrides: tuple[str, ...], message: str
) -> None:
    run = training()
    run.submit(*options, overrides=overrides)
    job = run.cluster.wait_for_state(run.job)
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0"), run.text()
    assert message in run.text()
    assert not run.folder.exists()


ENDS_WHEN_TOLD = """#!/bin/bash
trap '' TERM  # as train.sbatch does at its end
if [ -n "$SLURM_RESTART_COUNT" ]; then sleep 600; fi
python3 -m mesatron launch begin "$1" >"$2/begun" || exit
until [ -e "$2/end" ]; do sleep 0.1; done
exec python3 -m mesatron launch settle "$1"
"""


def submit_what_ends_when_told(run: Training, folder: Path, option: str) -> None:
    script = folder / "ends.sh"
    script.write_text(ENDS_WHEN_TOLD)
    options = [option, f"--output={run.output}", "--open-mode=append"]
    run.job = run.cluster.submit(*options, str(script), str(run.config), str(folder), env=environment(run.temporary))


def test_a_job_that_slurm_refuses_to_queue_again_says_so(training: Make, tmp_path: Path) -> None:
    run = training()
    (tmp_path / "end").touch()
    submit_what_ends_when_told(run, tmp_path, "--no-requeue")
    assert run.cluster.wait_for_state(run.job)["ExitCode"] == "1:0", run.text()
    assert run.decisions() == [
        "requeue (it failed or was killed)",
        f"no requeue after all: Slurm refuses `scontrol requeue {run.job}`: "
        f"Requested operation is presently disabled for job {run.job}",
    ]


@pytest.mark.long
def test_a_controller_that_is_restarted_as_a_job_ends(alone: Make, tmp_path: Path) -> None:
    """The job asks until it is there again; a request whose answer was lost does not end the next start."""
    run = alone(MessageTimeout="2")
    cluster, begun = run.cluster, tmp_path / "begun"
    submit_what_ends_when_told(run, tmp_path, "--requeue")
    cluster.wait_for(lambda: begun.exists() and "endpoint=" in begun.read_text(), 30, "the job to begin")
    cluster.stop_controller()
    (tmp_path / "end").touch()
    try:
        cluster.wait_for(lambda: "Slurm fails at" in run.text(), 30, "the job to find nobody")
    finally:
        cluster.start_controller()
    cluster.wait_for(lambda: cluster.job(run.job).get("Restarts") == "1", 60, f"a second start: {run.text()}")
    assert run.decisions() == ["requeue (it failed or was killed)"]
    cluster.wait_for_state(run.job, "RUNNING", seconds=60)
    again = f"from mesatron.cluster.scheduler import requeue; requeue({run.job!r}, '0')"
    cluster.on("n1", sys.executable, "-c", again, env=environment(run.temporary))
    assert (cluster.job(run.job)["JobState"], cluster.job(run.job)["Restarts"]) == ("RUNNING", "1")


@pytest.mark.long
def test_names_that_mislead_and_a_port_in_use_by_two_jobs_at_once(
    training: Make, untouched: Training, cluster: Cluster
) -> None:
    """Own names stand for loopback addresses, the other's first for an address that does not answer."""
    for node, other in (("n1", "n2"), ("n2", "n1")):
        cluster.write_hosts(node, f"127.0.1.1 {node}", f"fd77::99 {other}")
    runs = [training("first"), training("second")]
    listeners = []
    try:
        for run in runs:
            run.submit("--hold")
            port = 10_000 + int(run.job)
            code = f"import socket; s = socket.create_server(('', {port})); s.accept()"
            listeners.append(subprocess.Popen([*cluster.prefix("n1"), "python3", "-c", code]))
        for run in runs:
            cluster.slurm("scontrol", "release", run.job)
        for run in runs:
            run.finish()
            run.check_equals(untouched)
    finally:
        for listener in listeners:
            listener.kill()
            listener.wait()
        for node in cluster.nodes:
            cluster.write_hosts(node)
