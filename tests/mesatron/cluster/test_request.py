"""A request to stop reaches the attempt it is for, and lies in nobody's way once that is over."""

from pathlib import Path

from mesatron.cluster.request import FOR_CLUSTER, FOR_USER, asked_by_user, request_stop, withdraw
from mesatron.monitor.attempts import Attempt
from mesatron.train.stop import REQUEST_FILE


def asked(folder: Path, attempt: int) -> bool:
    request_stop(folder, "the cluster asked the job to end", FOR_CLUSTER, attempt)
    path = folder / REQUEST_FILE
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def test_only_an_attempt_that_is_not_over_is_asked(tmp_path: Path) -> None:
    assert asked(tmp_path, 1)  # it may be starting still
    first = Attempt(tmp_path / "attempts.jsonl", None)
    assert asked(tmp_path, 1)
    assert asked(tmp_path, 2)
    first.end("finished", 0)
    assert not asked(tmp_path, 1)
    assert asked(tmp_path, 2)
    Attempt(tmp_path / "attempts.jsonl", 3)
    assert not asked(tmp_path, 1)
    assert asked(tmp_path, 2)
    Attempt(tmp_path / "attempts.jsonl", 3)
    assert not asked(tmp_path, 2)


def test_the_cluster_does_not_take_the_place_of_a_person(tmp_path: Path) -> None:
    """Who has been told that the run will end must not find its job queued again."""
    request_stop(tmp_path, "the cluster asked the job to end", FOR_CLUSTER, 2)
    assert asked_by_user(tmp_path, 2) == ""
    request_stop(tmp_path, "enough", FOR_USER, 2)
    request_stop(tmp_path, "the cluster asked the job to end", FOR_CLUSTER, 2)
    assert asked_by_user(tmp_path, 2) == "enough"
    assert asked_by_user(tmp_path, 3) == ""
    request_stop(tmp_path, "the cluster asked the job to end", FOR_CLUSTER, 3)
    assert asked_by_user(tmp_path, 2) == ""
    withdraw(tmp_path)
    assert not (tmp_path / REQUEST_FILE).exists()
