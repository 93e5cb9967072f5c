"""Trainings as jobs of a real Slurm cluster, harmed in every way: each ends as one that nothing happened to.

Compared are all weights and moments of the last step (bit for bit) and the points in TensorBoard (each once); no
process, shared memory or temporary file may be left on any node.
"""

import signal
from collections.abc import Callable

from slurm_training import Training

Make = Callable[..., Training]


def test_a_plain_run(untouched: Training) -> None:
    assert untouched.starts() == 1
    assert [end["exit_code"] for end in untouched.records("end")] == [0]
    assert untouched.decisions() == []


def test_the_clusters_signal(training: Make, untouched: Training) -> None:
    """What `--signal=B:USR1@...` sends before the time limit: saved, ended with 76, queued again, finished."""
    run = training()
    run.submit()
    run.wait_for_step(7)
    run.cluster.slurm("scancel", "--batch", "--signal=USR1", run.job)
    run.finish()
    run.check_equals(untouched)
    first, second = run.records("end")
    assert first["exit_code"] == 76
    assert second["exit_code"] == 0
    assert run.decisions() == ["requeue (stopped on the cluster's request)"]
    assert run.records("start")[1]["resumed_from"] >= 7


def test_a_killed_rank_and_a_crashed_node(training: Make, untouched: Training) -> None:
    """First a process on one node, then the other node with the batch script and torchrun's store."""
    run = training()
    run.submit()
    run.wait_for_step(7)
    run.workers("n2")[0].send_signal(signal.SIGKILL)
    run.wait_for_step(12, start=2)
    run.cluster.crash("n1")
    run.cluster.boot("n1")
    run.finish()
    run.check_equals(untouched)
    assert [record.get("failed_node") for record in run.records("decision")] == ["n2", None, "n1"]
    assert [end["exit_code"] for end in run.records("end")] == [8, None, 0]
