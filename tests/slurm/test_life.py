"""Trainings as jobs of a real Slurm cluster, harmed in every way: each ends as one that nothing happened to.

Compared are all weights and moments of the last step (bit for bit) and the points in TensorBoard (each once); no
process, shared memory or temporary file may be left on any node.
"""

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_training import Training, environment

Make = Callable[..., Training]


def test_a_plain_run(untouched: Training) -> None:
    assert untouched.starts() == 1
    assert [end["exit_code"] for end in untouched.records("end")] == [0]
    assert untouched.decisions() == []


def test_the_clusters_signal_a_killed_rank_and_a_crashed_node(training: Make, untouched: Training) -> None:
    """One run, one after the other: what `--signal=B:USR1@...` sends before the time limit; a process on one node; the
    other node, with the batch script and the place where all meet."""
    run = training()
    run.submit()
    run.wait_for_step(7)
    run.cluster.slurm("scancel", "--batch", "--signal=USR1", run.job)
    run.wait_for_step(12, start=2)
    run.workers("n2")[0].send_signal(signal.SIGKILL)
    run.wait_for_step(17, start=3)
    run.cluster.crash("n1")
    run.cluster.boot("n1")
    run.finish()
    run.check_equals(untouched)
    assert f"mesatron: job {run.job} was queued again; this is its start 4.\n" in run.text()
    assert [end["exit_code"] for end in run.records("end")] == [76, 8, None, 0]
    assert run.records("start")[1]["resumed_from"] >= 7
    assert run.decisions() == [
        "requeue (stopped on the cluster's request)",
        "node n2 failed: a process there ended without a word",
        "requeue (it failed or was killed)",
        "node n1 failed: a process there ended without a word",
    ]


def test_a_disk_that_fails_for_a_while(training: Make, untouched: Training, tiny_data: Path, tmp_path: Path) -> None:
    """A shard cannot be read until the first start has ended: it is the beginning of a process's memory."""
    shards = shutil.copytree(tiny_data / "shards", tmp_path / "shards")
    shard = sorted((shards / "train").glob("*.zstd"))[0]
    whole = shard.rename(tmp_path / "whole")
    shard.symlink_to("/proc/self/mem")
    run = training("run", **{"data.folder": str(shards)})
    run.submit()
    run.cluster.wait_for(lambda: run.records("end"), 120, "the first attempt to end")
    whole.replace(shard)
    run.finish()
    run.check_equals(untouched)
    assert [end["exit_code"] for end in run.records("end")] == [11, 0]
    assert run.decisions() == ["requeue (its storage failed)"]


@pytest.mark.long
@pytest.mark.parametrize("signal_name", ["USR2", "HUP", "TERM"])
def test_another_signal_of_the_cluster(training: Make, untouched: Training, signal_name: str) -> None:
    run = training("run", **{"launch.stop_signal": signal_name})
    run.launch("--cpus-per-task=2")
    assert f"#SBATCH --signal=B:{signal_name}@" in (run.folder / "launch/train.sbatch").read_text()
    run.wait_for_step(7)
    run.cluster.slurm("scancel", "--batch", f"--signal={signal_name}", run.job)
    run.finish()
    run.check_equals(untouched)
    assert [end["exit_code"] for end in run.records("end")] == [76, 0]
    assert run.decisions() == ["requeue (stopped on the cluster's request)"]


SLOW_DISK = """
import os, time
from pathlib import Path

fsync = os.fsync

def slow_fsync(descriptor):
    if "/optimizer" in os.readlink(f"/proc/self/fd/{descriptor}"):
        time.sleep(float(Path(__file__).with_name("seconds").read_text()))
    fsync(descriptor)

os.fsync = slow_fsync
"""


@pytest.mark.long
def test_a_save_of_90_seconds(training: Make, tmp_path: Path) -> None:
    """Neither torchrun's 30 s nor Slurm's 10 s after a TERM cut it: the signal goes to the batch script alone."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "sitecustomize.py").write_text(SLOW_DISK)
    (disk / "seconds").write_text("90")
    run = training("run", **{"train.steps": 9000, "checkpoint.every_steps": 3000, "evaluate.every_steps": 9000})
    run.submit(variables={"PYTHONPATH": f"{disk}:{environment(run.temporary)['PYTHONPATH']}"})
    run.wait_for_step(7)
    run.cluster.slurm("scancel", "--batch", "--signal=USR1", run.job)
    run.cluster.wait_for(lambda: run.records("end"), 240, "the first attempt to end")
    (disk / "seconds").write_text("0")
    assert run.records("end")[0]["exit_code"] == 76
    run.wait_for_step(run.step() + 5, start=2)
    saved = run.records("start")[1]["resumed_from"]
    assert saved >= 7
    assert re.search(rf"step {saved}: saved .* in (9|1\d)\d\.\d s", run.text())
    run.verb("launch", "stop", str(run.folder))
    run.finish(code=75)


@pytest.mark.long
def test_killed_launchers(training: Make, untouched: Training) -> None:
    """torchrun on either node: its workers end with it, the others notice, the job starts again."""
    run = training()
    run.submit()
    run.wait_for_step(7)
    run.agent("n2").send_signal(signal.SIGKILL)
    run.wait_for_step(12, start=2)
    run.agent("n1").send_signal(signal.SIGKILL)
    run.finish()
    run.check_equals(untouched)
    assert run.starts() == 3


@pytest.mark.long
def test_requeued_by_hand_and_cancelled(training: Make, untouched: Training) -> None:
    """`scontrol requeue` starts the job again; after `scancel` it stays ended, and the same script goes on."""
    run = training()
    run.submit()
    run.wait_for_step(7)
    run.cluster.slurm("scontrol", "requeue", run.job)
    run.wait_for_step(12, start=2)
    run.cluster.slurm("scancel", run.job)
    run.cluster.wait_for_state(run.job, "CANCELLED")
    run.check_no_process()
    run.submit()
    run.finish()
    run.check_equals(untouched)
    assert run.starts() == 3
    # Slurm sends the script a TERM in both cases, which leaves a request if there is time.
    assert set(run.decisions()) <= {
        f"Removed a request to stop attempt {n} (the cluster asked the job to end)." for n in (1, 2)
    }


@pytest.mark.long
def test_preempted(training: Make, untouched: Training, tmp_path: Path) -> None:
    """A job of the urgent partition takes the nodes; with the grace time the run saves first."""
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 3\n")
    run = training("run", **{"launch.processes_per_node": 1})
    run.submit("--exclusive")
    run.wait_for_step(7)
    options = ["--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", str(urgent)]
    other = run.cluster.submit(*options)
    run.cluster.wait_for_state(other, "COMPLETED")
    run.finish()
    run.check_equals(untouched)
    assert run.starts() == 2
    assert run.records("end")[0]["exit_code"] == 76


@pytest.mark.long
@pytest.mark.parametrize(("limit", "told"), [("3", "USR1@60"), ("1", "URG@1")])
def test_the_time_limit(training: Make, limit: str, told: str) -> None:
    """Told before it, or not (bash ignores URG): then a TERM comes, and a save that is quick enough is the last."""
    run = training("limit", **{"train.steps": 9000, "checkpoint.every_steps": 3000, "evaluate.every_steps": 9000})
    run.submit(f"--time={limit}", f"--signal=B:{told}")
    run.cluster.wait_for(lambda: run.records("end"), 240, "the first attempt to end")
    assert run.records("end")[0]["exit_code"] == 76
    run.wait_for_step(run.step() + 5, start=2)
    assert run.records("start")[1]["resumed_from"] > 0
    assert run.decisions()[0] == "requeue (stopped on the cluster's request)"
    run.verb("launch", "stop", str(run.folder))
    run.finish(code=75)


@pytest.mark.long
def test_a_node_that_fails_twice_is_left_out(training: Make, untouched: Training) -> None:
    run = training()
    run.submit()
    run.wait_for_step(7)
    run.workers("n2")[0].send_signal(signal.SIGKILL)
    run.wait_for_step(12, start=2)
    run.workers("n2")[0].send_signal(signal.SIGKILL)
    run.finish()
    run.check_equals(untouched)
    assert run.cluster.job(run.job)["ExcNodeList"] == "n2"
    assert run.decisions()[-1] == "requeue (it failed or was killed) without n2"
    assert run.cluster.job(run.job)["NodeList"] == "n[1,3]"


@pytest.mark.long
def test_a_node_that_failed_twice_is_given_again(training: Make, untouched: Training) -> None:
    """The job leaves it as it begins, and has told Slurm so before the TERM that follows ends it."""
    run = training()
    run.folder.mkdir(parents=True)
    failed = {"event": "decision", "attempt": None, "time": 1.0, "step": 0, "what": "node n1 failed"}
    (run.folder / "attempts.jsonl").write_text(json.dumps(failed | {"failed_node": "n1", "failures": 2}) + "\n")
    run.submit()
    run.finish()
    run.check_equals(untouched)
    assert run.decisions()[1:] == ["requeue: n1 failed 2 times and is excluded"]
    assert f"Job {run.job} was given n1 again, and is queued again without." in run.text()
    assert run.cluster.job(run.job)["NodeList"] == "n[2-3]"


@pytest.mark.long
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_an_unplugged_node(training: Make, untouched: Training, node: str) -> None:
    """Its processes live on while the job starts again elsewhere, until a watchdog ends them or Slurm does, and their
    batch script goes on. They must not harm it."""
    run = training("run", **{"train.watchdog_seconds": 20})
    run.submit()
    run.wait_for_step(7)
    run.cluster.unplug(node)
    try:
        run.wait_for_step(12, start=2)
    finally:
        run.cluster.plug(node)
    run.finish()
    run.check_equals(untouched)
    if node == "n2":  # else the batch script is out of reach
        assert f"mesatron: Slurm queues job {run.job} again by itself.\n" in run.text()


@pytest.mark.long
def test_a_killed_slurmd(training: Make, untouched: Training) -> None:
    """The daemon alone: the tasks live on after the job is taken from the node."""
    run = training()
    run.submit()
    run.wait_for_step(7)
    run.cluster.kill_slurmd("n2")
    run.cluster.wait_for(lambda: run.starts() == 2 or run.step() == run.steps, 90, "the job to go on")
    run.cluster.start_slurmd("n2")
    run.finish()
    run.check_equals(untouched)
