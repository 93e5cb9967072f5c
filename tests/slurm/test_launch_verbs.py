"""`mesatron launch` from the head of a real Slurm cluster: submitting, looking, stopping, resuming, sweeping."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_training import Training

Make = Callable[..., Training]


def note(run: Training, file: str, **values: Any) -> None:
    """Change what a launch folder knows of the run's job."""
    path = run.folder / "launch" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_stopped_and_resumed(training: Make, untouched: Training) -> None:
    """The job needs no more than its run folder, whatever that is called: it runs the copy of the code there."""
    run = training('a run\'s #1, "100%j"')
    run.launch("--gres=gpu:1", "--time=10", "--sbatch=comment=test")
    assert run.cluster.job(run.job)["TimeLimit"] == "00:10:00"
    again = run.verb("launch", "slurm", str(run.config), "--nodes=2", check=False)
    assert again.returncode == 2
    assert f"Job {run.job} of {run.folder} has not ended" in again.stderr
    run.wait_for_step(7)
    with run.paused():
        assert run.workers("n2")[0].environ()["PYTHONPATH"] == str(run.folder / "launch/code")
        # Slurm has queued the job again and started it elsewhere, and it has not come to note that.
        job_file = run.folder / "launch/job.json"
        noted = job_file.read_text()
        note(run, "job.json", nodes=["n8", "n9"], words=str(run.folder / f"launch/words-{run.job}-9"), attempt=0)
        status = run.verb("launch", "status", str(run.folder)).stdout
        assert f"job        {run.job}, RUNNING on n1 n2\noutput     {run.output}\n" in status
        assert "said " not in status
        assert re.search("(?m)^running    attempt 2 begins, from (step [0-9]+|the start)$", status)
        run.verb("launch", "stop", str(run.folder))
        job_file.write_text(noted)
    run.finish(code=75)
    _, stopped, rest = run.text().partition("mesatron: Stopped on request (mesatron launch stop) after step ")
    assert stopped
    assert re.findall("(?m)^(?!srun|slurmstepd).+", rest.partition("\n")[2]) == []
    reached = run.step()
    assert reached < run.steps
    assert run.records("end")[0]["exit_code"] == 75
    # Also where it was submitted from a folder with another copy, which Python looks at first.
    (run.folder / "launch/code/mesatron/__init__.py").write_text("import sys; print('the copy', file=sys.stderr)")
    run.take_job(run.verb("launch", "resume", str(run.folder)).stdout)
    run.wait_for_step(reached + 1)
    with run.paused():
        status = run.verb("launch", "status", str(run.folder)).stdout
        assert f"\nrunning    attempt 2, from step {reached}\n" in status
        assert "asked " not in status
    run.finish()
    assert "the copy" in run.text()
    assert run.records("start")[1]["resumed_from"] >= 7
    run.check_equals(untouched)
    steps = f"{run.steps} of {run.steps}"
    assert f"step       {steps}; {run.steps} is saved" in run.verb("launch", "status", str(run.folder)).stdout
    assert f"is complete: step {steps} is saved" in run.verb("launch", "resume", str(run.folder)).stdout
    folder = run.verb("launch", "status", str(run.folder / "launch"), check=False)
    assert folder.returncode == 2
    assert "launch is no run folder: it has neither attempts nor a job" in folder.stderr


def test_a_run_that_is_looked_at_and_stopped_in_preflight(training: Make) -> None:
    run = training("run", **{"launch.preflight_seconds": 300})
    run.launch()

    def last_lines() -> list[str]:
        return run.verb("launch", "status", str(run.folder)).stdout.splitlines()[-2:]

    run.cluster.wait_for(lambda: run.workers("n1"), 60, "preflight to begin")
    with run.paused():
        assert last_lines()[-1] == "running    attempt 1 begins, from the start"
        run.verb("launch", "stop", str(run.folder))
        assert last_lines() == [
            "running    attempt 1 begins, from the start",
            "asked      to stop (mesatron launch stop)",
        ]
    run.finish(code=75)
    assert run.step() == 0
    assert [line.split()[0] for line in last_lines()] == ["step", "attempts"]


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
    for number, point in enumerate(points):
        submitted = json.loads((point.folder / "launch/submitted.json").read_text())
        assert submitted["job"] == f"{job}_{number}"
        assert f"runs/{point.folder.name}" in Path(submitted["output"]).read_text()
    starts = [point.records("end")[0]["time"] for point in points]
    assert max(starts) < run.records("start")[0]["time"]


def sweep(run: Training, *options: str) -> tuple[str, Path, list[Training]]:
    """An array of three runs, one node each: its id, its folder, and its runs, each followed as its own job."""
    done = run.verb("launch", "slurm", str(run.config), "--sweep=train.seed=1,2,3", *options)
    job, *folders = done.stdout.split()[1:]
    whole = run.folder.with_name(f"{run.folder.name}-sweep")
    points = [run.beside(folder) for folder in folders]
    for number, point in enumerate(points):
        point.job, point.output = f"{job}_{number}", whole / f"launch/slurm-{job}_{number}.out"
    return job, whole, points


def test_members_of_a_sweep_wait_and_are_cancelled_alone(training: Make) -> None:
    """Also the last one, whose id is the whole array's, when the others are jobs of their own already."""
    run = training()
    job, whole, (first, second, last) = sweep(run, "--sbatch=begin=now+1hour")
    for point in (first, second):
        run.cluster.slurm("scontrol", "hold", point.job)
    for folder, reason in ((last.folder, f"2 of {last.folder} has not ended"), (whole, f"0 of {first.folder} is held")):
        assert f"Job {job}_{reason}" in run.verb("launch", "resume", str(folder), check=False).stderr
    assert f"Job {job}_2 was waiting" in run.verb("launch", "stop", str(last.folder)).stdout
    assert run.verb("launch", "status", str(last.folder)).stdout.splitlines()[1].split()[2] in ("UNKNOWN", "CANCELLED")
    lines = run.verb("launch", "status", str(whole)).stdout.splitlines()
    assert lines[0] == f"array      {whole}"
    assert [line.partition(" (")[0] for line in lines[1:3]] == [
        f"run        {point.folder}, job {point.job}, PENDING" for point in (first, second)
    ]
    assert run.verb("launch", "stop", str(whole)).stdout.splitlines() == [
        f"{first.folder}: Job {job}_0 was waiting and is cancelled.",
        f"{second.folder}: Job {job}_1 was waiting and is cancelled.",
        f"{last.folder}: Nothing trains there, and no job waits to.",
    ]
    assert "Nothing trains" in run.verb("launch", "stop", str(whole), check=False).stderr
    # Every run knows the job of all.
    again = run.verb("launch", "resume", str(whole)).stdout.split()[1]
    assert f"job        {again}_1, PENDING" in run.verb("launch", "status", str(second.folder)).stdout


@pytest.mark.long
def test_the_last_member_of_a_sweep_starts_again_alone(training: Make) -> None:
    """Its rank is killed while the others train, and when they have ended."""
    run = training(**{"train.steps": 20000})
    job, whole, points = sweep(run, "--cpus-per-task=16")  # a node each
    cluster, last = run.cluster, points[2]
    for point in points:
        point.wait_for_step(6)
    nodes = [cluster.job(point.job)["NodeList"] for point in points]
    status = run.verb("launch", "status", str(last.folder)).stdout
    assert f"job        {job}_2, RUNNING on {nodes[2]}\noutput     {last.output}\n" in status
    assert run.verb("launch", "status", str(whole)).stdout.splitlines()[1:] == [
        f"run        {point.folder}, job {point.job}, RUNNING on {node}"
        for point, node in zip(points, nodes, strict=True)
    ]
    for folder, number in ((last.folder, 2), (whole, 0)):
        refused = run.verb("launch", "resume", str(folder), check=False)
        assert refused.returncode == 2
        assert f"Job {job}_{number} of {points[number].folder} has not ended" in refused.stderr

    last.workers(nodes[2])[0].kill()
    last.wait_for_step(last.step() + 1, start=2)
    assert [cluster.job(point.job)["Restarts"] for point in points] == ["0", "0", "1"]
    for point in points[:2]:
        assert cluster.job(point.job)["JobState"] == "RUNNING"
        run.verb("launch", "stop", str(point.folder))
        cluster.wait_for_state(point.job)
    last.workers(cluster.job(last.job)["NodeList"])[0].kill()
    last.wait_for_step(last.step() + 1, start=3)
    assert [cluster.job(point.job)["Restarts"] for point in points] == ["0", "0", "2"]

    job_file = last.folder / "launch/job.json"
    noted = job_file.read_text()
    (last.folder / "launch/submitted.json").unlink()
    note(last, "job.json", job=job)  # as earlier versions did
    status = run.verb("launch", "status", str(last.folder)).stdout
    assert f"job        {job}, RUNNING on {cluster.job(last.job)['NodeList']}\n" in status
    job_file.write_text(noted)

    stopped = run.verb("launch", "stop", str(whole)).stdout.splitlines()
    assert stopped[2] == f"{last.folder}: Attempt 3 will save after its next step and end."
    assert ["Nothing trains there" in line for line in stopped] == [True, True, False]
    assert not (whole / "stop-request.json").exists()
    last.finish(code=75)


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


@pytest.mark.long
def test_another_job_with_the_id_of_an_older_one(training: Make, untouched: Training, tmp_path: Path) -> None:
    """Where a cluster has begun to count anew it is neither looked at nor cancelled, and in nobody's way."""
    script = tmp_path / "other.sh"
    script.write_text("#!/bin/bash\nsleep 600\n")
    options = ["--output=/dev/null", str(script)]
    cluster, run = untouched.cluster, training()
    waiting = cluster.submit("--hold", *options)
    run.launch("--sbatch=begin=now+1hour")
    submitted = run.folder / "launch/submitted.json"
    own = submitted.read_text()
    for noted in (json.dumps(json.loads(own) | {"job": waiting}), json.dumps({"job": waiting})):
        submitted.write_text(noted)
        assert f"job        {waiting}, UNKNOWN\n" in run.verb("launch", "status", str(run.folder)).stdout
        assert "Nothing trains" in run.verb("launch", "stop", str(run.folder), check=False).stderr
        assert cluster.job(waiting)["JobState"] == "PENDING"
    submitted.write_text(json.dumps({"job": run.job}))  # as earlier versions noted it
    assert f"job        {run.job}, PENDING (BeginTime)\n" in run.verb("launch", "status", str(run.folder)).stdout
    assert f"Job {run.job} was waiting" in run.verb("launch", "stop", str(run.folder)).stdout
    assert cluster.job(run.job)["JobState"] == "CANCELLED"

    run.output = run.config.parent / "job.out"
    # It inherits these from a shell in a member of an array, and belongs to none.
    run.submit("--output", str(run.output), variables={"SLURM_ARRAY_JOB_ID": waiting, "SLURM_ARRAY_TASK_ID": "0"})
    run.wait_for_step(3)
    with run.paused():
        status = run.verb("launch", "status", str(run.folder)).stdout
        assert f"job        {run.job}, RUNNING on n1 n2\noutput     {run.output}\n" in status
        run.verb("launch", "stop", str(run.folder))
    run.finish(code=75)
    running = cluster.submit("--nodelist=n3", *options)
    cluster.wait_for_state(running, "RUNNING")
    note(run, "job.json", job=running)
    assert "Nothing trains" in run.verb("launch", "stop", str(run.folder), check=False).stderr
    run.submit()
    run.wait_for_step(run.step() + 1, start=2)
    assert cluster.job(running)["JobState"] == "RUNNING"


@pytest.mark.long
def test_a_stop_that_the_run_does_not_live_to_heed(training: Make, untouched: Training) -> None:
    """The person has been told that it will end: neither Slurm nor the job itself starts it again."""
    run = training()
    run.submit()

    run.wait_for_step(7)
    with run.paused() as workers:
        run.verb("launch", "stop", str(run.folder))
        run.cluster.slurm("scontrol", "requeue", run.job)
        for worker in workers:
            worker.kill()
    run.finish(code=75)
    assert run.decisions() == ["no further start: attempt 1 was asked to stop (mesatron launch stop)"]

    run.submit()
    run.wait_for_step(run.step() + 5, start=2)
    with run.paused() as workers:
        run.verb("launch", "stop", str(run.folder))
        for worker in workers:
            worker.kill()
    run.finish(code=1)
    asked = "attempt 2 was asked to stop (mesatron launch stop)"
    assert run.decisions()[-1] == f"no requeue (it failed or was killed): {asked}"
    run.submit()
    run.finish()
    run.check_equals(untouched)


@pytest.mark.long
def test_a_stop_between_two_starts(alone: Make, tmp_path: Path) -> None:
    epilog = tmp_path / "epilog"
    epilog.write_text("#!/bin/bash\nsleep 10\n")
    epilog.chmod(0o755)
    run = alone(Epilog=str(epilog))
    run.launch("--nodes=1")
    run.wait_for_step(7)
    run.cluster.slurm("scancel", "--batch", "--signal=USR1", run.job)
    run.cluster.wait_for(lambda: run.cluster.job(run.job)["JobState"] == "COMPLETING", 60, "the job to end")
    refused = run.verb("launch", "stop", str(run.folder), check=False)
    assert refused.returncode == 2
    assert f"Job {run.job} of {run.folder} is just ending and may start again" in refused.stderr
    run.cluster.wait_for(lambda: run.cluster.job(run.job)["JobState"] != "COMPLETING", 60, "the job to wait")
    run.verb("launch", "stop", str(run.folder))


@pytest.mark.long
def test_a_job_that_slurm_holds(alone: Make, tmp_path: Path) -> None:
    """A node that fails to begin a job is drained, and the job held for good, unless Slurm is told not to hold it."""
    fault, prolog = tmp_path / "fault", tmp_path / "prolog"
    fault.touch()
    prolog.write_text(f"#!/bin/bash\n[ ! -e {fault} ]\n")
    prolog.chmod(0o755)
    run = alone(Prolog=str(prolog), SchedulerParameters="bf_interval=1,sched_interval=1,batch_sched_delay=0")
    run.launch("--nodes=1")
    run.cluster.wait_for(lambda: run.cluster.job(run.job)["Priority"] == "0", 30, "the job to be held")
    assert "State=IDLE+DRAIN" in run.cluster.slurm("scontrol", "show", "node", "n1")
    reason, remedy = "launch_failed_requeued_held", f"`mesatron launch resume {run.folder}` releases it"
    status = run.verb("launch", "status", str(run.folder)).stdout
    assert f"job        {run.job}, PENDING ({reason}); {remedy}\n" in status
    again = run.verb("launch", "slurm", str(run.config), check=False).stderr
    assert f"Job {run.job} of {run.folder} is held ({reason}); {remedy}." in again
    fault.unlink()
    resumed = run.verb("launch", "resume", str(run.folder)).stdout
    assert resumed == f"job {run.job}, which Slurm held, is released\n"
    run.cluster.wait_for(lambda: "DRAINED" in run.cluster.job(run.job)["Reason"], 30, "Slurm to look at the job")
    assert "PENDING (Nodes_required_for_job_are_DOWN,_DRAINED" in run.verb("launch", "status", str(run.folder)).stdout
    run.cluster.slurm("scontrol", "update", "nodename=n1", "state=resume")
    run.finish()
    assert run.step() == run.steps
    assert [end["exit_code"] for end in run.records("end")] == [0]


@pytest.mark.parametrize(("verb", "reason"), [("hold", "JobHeldAdmin"), ("uhold", "JobHeldUser")])
def test_a_job_that_a_person_holds_stays_held(training: Make, verb: str, reason: str) -> None:
    run = training()
    run.launch("--sbatch=begin=now+1hour")
    run.cluster.slurm("scontrol", verb, run.job)
    held = f"({reason}); `scontrol release {run.job}` releases it"
    assert f"job        {run.job}, PENDING {held}\n" in run.verb("launch", "status", str(run.folder)).stdout
    refused = run.verb("launch", "resume", str(run.folder), check=False)
    assert refused.returncode == 2
    assert f"Job {run.job} of {run.folder} is held {held}." in refused.stderr
    assert run.cluster.job(run.job)["Reason"] == reason


def test_a_job_that_fails_before_it_trains_says_why(training: Make) -> None:
    run = training()
    run.launch("--sbatch=gpus=4", "parallel.data_size=2")
    run.cluster.wait_for_state(run.job, "FAILED")
    status = run.verb("launch", "status", str(run.folder)).stdout
    assert f"output     {run.output}\nsaid       parallel.data_size 2 times parallel.tensor_size" in status
    assert "calls for 2 processes, not 4" in status


def test_what_slurm_refuses_leaves_no_trace(training: Make) -> None:
    run = training()
    refused = ["launch", "slurm", str(run.config), "--nodes=2", "--partition=none", "train.peak_lr=1e-3"]
    assert run.verb(*refused, check=False).returncode == 2
    assert run.verb(*refused, "--sweep=train.seed=1,2", check=False).returncode == 2
    assert not run.folder.parent.exists()
    run.folder.mkdir(parents=True)
    (run.folder / "notes.txt").write_text("mine")
    assert run.verb(*refused, check=False).returncode == 2
    assert [path.name for path in run.folder.rglob("*")] == ["notes.txt"]
    assert "was not started by" in run.verb("launch", "resume", str(run.folder), check=False).stderr
    run.launch("--sbatch=begin=now+1hour")
    run.verb("launch", "stop", str(run.folder))
    (run.folder / "launch/code/mesatron/ours.py").write_text("ours")
    before = {path: path.is_file() and path.read_bytes() for path in run.folder.rglob("*")}
    assert run.verb(*refused, check=False).returncode == 2
    assert {path: path.is_file() and path.read_bytes() for path in run.folder.rglob("*")} == before
    run.launch("--sbatch=begin=now+1hour")
    assert not (run.folder / "launch/code/mesatron/ours.py").exists()
    assert not (run.folder / "launch/replaced-code").exists()


def test_the_signal_leaves_half_of_the_time_limit_also_when_resumed(training: Make) -> None:
    run = training()
    run.launch("--time=4", "--sbatch=begin=now+1hour")
    script = run.folder / "launch/train.sbatch"
    assert "\n#SBATCH --signal=B:USR1@120\n" in script.read_text()
    run.verb("launch", "stop", str(run.folder))
    run.verb("launch", "resume", str(run.folder))
    assert "\n#SBATCH --signal=B:USR1@120\n" in script.read_text()


def test_what_cannot_fit_is_refused_before_it_is_submitted(training: Make) -> None:
    run = training()
    for options, message in {
        ("--nodes=3",): "8 is no multiple of 2 x 3 = 6",
        ("--nodes=2", "--gres=gpu:3"): "8 is no multiple of 2 x 6 = 12",
        ("--nodes=1", "parallel.tensor_size=2"): "must be a multiple of parallel.tensor_size",
        ("--nodes=2", "--sweep=train.peak_lr"): "--sweep train.peak_lr is not of the form key=value,value",
        ("--sweep=train.seed=1,2,1",): "runs/tiny-seed-1; give each value once",
        ("--nodes=2", "--sbatch=ntasks-per-node=2"): "ntasks-per-node=2 cannot be given: a node has one task",
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
