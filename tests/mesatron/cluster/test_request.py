"""A request to stop reaches the attempt it is for, and lies in nobody's way once that is over."""

from pathlib import Path

from mesatron.cluster.request import FOR_CLUSTER, request_stop
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
