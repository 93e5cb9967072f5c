"""`mesatron launch` from the head of a real Slurm cluster: submitting, looking, stopping, resuming, sweeping."""

from collections.abc import Callable

from slurm_training import Training


Make = Callable[..., Training]


def test_stopped_and_resumed(training: Make, untouched: Training) -> None:
    """The job needs no more than its run folder: it runs the copy of the code that lies there."""
    run = training()
    run.launch("--gres=gpu:1", "--time=10", "--sbatch=comment=test")
    assert run.cluster.job(run.job)["TimeLimit"] == "00:10:00"
    again = run.verb("launch", "slurm", str(run.config), "--nodes=2", check=False)
    assert again.returncode == 2
    assert f"Job {run.job} of {run.folder} has not ended" in again.stderr
    run.wait_for_step(7)
    assert f"job        {run.job}, RUNNING on n1 n2\n" in run.verb("launch", "status", str(run.folder)).stdout
    assert run.workers("n2")[0].environ()["PYTHONPATH"] == str(run.folder / "launch/code")
    run.verb("launch", "stop", str(run.folder))
    run.finish(code=75)
    reached = run.step()
    assert reached < run.steps
    assert run.records("end")[0]["exit_code"] == 75
    run.take_job(run.verb("launch", "resume", str(run.folder)).stdout)
    run.finish()
    assert run.records("start")[1]["resumed_from"] >= 7
    run.check_equals(untouched)
    assert f"step       {run.steps} of {run.steps} is saved" in run.verb("launch", "status", str(run.folder)).stdout
