"""`mesatron launch` from the head of a real Slurm cluster: submitting, looking, stopping, resuming, sweeping."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
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


@pytest.mark.long
def test_a_sweep_and_a_job_after_it(training: Make, untouched: Training) -> None:
    """Each point is a run of its own; the one with the usual value equals the usual run. Then a chained job."""
    run = training()
    sweep = run.verb("launch", "slurm", str(run.config), "--nodes=2", "--sweep=train.peak_lr=3e-3,1e-3")
    job, *folders = sweep.stdout.split()[1:]
    assert [Path(folder).name for folder in folders] == ["tiny-peak_lr-3e-3", "tiny-peak_lr-1e-3"]
    run.launch("--dependency", f"afterok:{job}")
    run.finish(seconds=400)
    run.check_equals(untouched)
    points = [run.beside(folder) for folder in folders]
    points[0].check_equals(untouched)
    assert points[1].checksums().keys() == untouched.checksums().keys()
    assert points[1].checksums() != untouched.checksums()
    starts = [point.records("end")[0]["time"] for point in points]
    assert max(starts) < run.records("start")[0]["time"]


@pytest.mark.long
def test_a_comparison_as_an_array(training: Make, untouched: Training) -> None:
    """Each variant is a run of its own; the one like the usual run equals it. Then the same command measures them."""
    run = training()
    file, out = run.config.with_name("comparison.yaml"), run.config.parent / "out"
    variants = {"usual": {}, "slow": {"train.peak_lr": 1e-3}}
    file.write_text(
        yaml.safe_dump({"base": run.config.name, "output": str(out), "variants": variants}, sort_keys=False)
    )
    answer = run.verb("compare", str(file), "--slurm", "--sbatch=nodes=2").stdout
    early = run.verb("compare", str(file), check=False)
    assert early.returncode == 2
    assert "has not ended" in early.stderr
    run.launch("--dependency", f"afterok:{answer.split()[1]}")
    run.finish(seconds=400)
    usual, slow = (run.beside(str(out / "runs" / name)) for name in variants)
    usual.check_equals(untouched)
    assert slow.checksums() != untouched.checksums()
    measured = run.verb("compare", str(file), seconds=300).stdout
    assert "| usual " in measured
    assert "step 1/" not in measured
    assert [line.split(",")[0] for line in (out / "results.csv").read_text().splitlines()[1:]] == list(variants)


def test_what_cannot_fit_is_refused_before_it_is_submitted(training: Make) -> None:
    run = training()
    for options, message in {
        ("--nodes=3",): "8 is no multiple of 2 x 3 = 6",
        ("--nodes=2", "--gres=gpu:3"): "8 is no multiple of 2 x 6 = 12",
        ("--nodes=1", "parallel.tensor_size=2"): "must be a multiple of parallel.tensor_size",
        ("--nodes=2", "--sweep=train.peak_lr"): "--sweep train.peak_lr is not of the form key=value,value",
        ("--nodes=2", "--partition=none"): "invalid partition specified: none",
    }.items():
        done = run.verb("launch", "slurm", str(run.config), *options, check=False)
        assert done.returncode == 2
        assert message in done.stderr
    assert "Nothing trains" in run.verb("launch", "stop", str(run.folder), check=False).stderr


def test_a_dry_run_writes_nothing(training: Make) -> None:
    run = training("run", **{"launch.stop_signal": "HUP", "launch.lead_seconds": 77})
    options = ["--nodes=2", "--container-image=some image", "--container-mounts=/a:/b", "--dry-run"]
    script = run.verb("launch", "slurm", str(run.config), *options).stdout
    assert "#SBATCH --signal=B:HUP@77\n" in script
    assert "container=('--container-image=some image' --container-mounts=/a:/b)\n" in script
    assert not run.folder.exists()
