"""Where a run's time went, against stories whose times are known."""

import pytest

from mesatron.monitor.goodput import Goodput, Ledger, account

KEPT = {"training": 60.0, "data": 2.0, "validation": 8.0, "checkpoint": 5.0}


def test_a_run_with_a_kill_and_a_pause() -> None:
    """Killed 30 s after its last checkpoint, started again 100 s later, stopped, and found complete in the end."""
    records = [
        {"event": "start", "attempt": 1, "time": 1000.0},
        {"event": "ready", "attempt": 1, "time": 1010.0, "step": 0},
        {"event": "decision", "attempt": 1, "time": 1020.0, "step": 3, "what": "skip"},
        {"event": "end", "attempt": 1, "time": None, "last_seen": 1080.0, "exit_code": None},
        {"event": "start", "attempt": 2, "time": 1180.0},
        {"event": "ready", "attempt": 2, "time": 1200.0, "step": 5},
        {"event": "end", "attempt": 2, "time": 1235.0, "exit_code": 0},
        {"event": "start", "attempt": 3, "time": 9000.0},
        {"event": "end", "attempt": 3, "time": 9001.0, "exit_code": 0},
    ]
    found = account(records, KEPT, 9999.0)
    assert found == Goodput(2, **KEPT, starting=30.0, between=100.0, lost=30.0)
    assert found.total == 235.0
    assert found.describe() == (
        "0:03:55 in 2 attempts: training 25.5%, data 0.9%, validation 3.4%, checkpoint 2.1%, starting 12.8%, "
        "between 42.6%, lost 12.8%"
    )


def test_attempts_that_came_to_no_step() -> None:
    """All the time of one that failed at its start went into starting, as did that of one that is still there."""
    records = [
        {"event": "start", "attempt": 1, "time": 10.0},
        {"event": "end", "attempt": 1, "time": 14.0, "exit_code": 3},
        {"event": "start", "attempt": 2, "time": 20.0},
    ]
    found = account(records, {}, 25.0)
    assert (found.attempts, found.starting, found.between, found.lost, found.total) == (2, 9.0, 6.0, 0.0, 15.0)


def test_clocks_that_go_back() -> None:
    """The second attempt is on a node whose clock is behind; the third's is set back while it starts."""
    records = [
        {"event": "start", "attempt": 1, "time": 100.0},
        {"event": "ready", "attempt": 1, "time": 110.0},
        {"event": "end", "attempt": 1, "time": 150.0, "exit_code": 76},
        {"event": "start", "attempt": 2, "time": 90.0},
        {"event": "ready", "attempt": 2, "time": 95.0},
        {"event": "end", "attempt": 2, "time": 140.0, "exit_code": 76},
        {"event": "start", "attempt": 3, "time": 160.0},
        {"event": "ready", "attempt": 3, "time": 155.0},
    ]
    found = account(records, {"training": 40.0}, 200.0)
    assert found == Goodput(3, 40.0, 0.0, 0.0, 0.0, starting=10.0, between=10.0, lost=40.0)


def test_every_second_has_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("mesatron.monitor.goodput.time.monotonic", lambda: float(next(clock)))
    ledger = Ledger({"training": 100.0})
    ledger.begin()
    with ledger.during("data"):
        pass
    assert ledger.read() == {"training": 102.0, "data": 1.0, "validation": 0.0, "checkpoint": 0.0}
    with ledger.during("checkpoint"), ledger.during("validation"):
        pass
    assert ledger.read() == {"training": 104.0, "data": 1.0, "validation": 1.0, "checkpoint": 2.0}
