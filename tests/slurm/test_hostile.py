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
