"""The log of attempts, written by processes that end well, end badly, or are killed, against what happened to them."""

import json
import multiprocessing
import os

import pytest

from mesatron.errors import FencedError
from mesatron.monitor.attempts import Attempt


def attempt(path, resumed_from, exit_code):
    running = Attempt(path, resumed_from)
    if exit_code is None:
        os.kill(os.getpid(), 9)
    running.end("finished" if exit_code == 0 else "non-finite gradients", exit_code)


def test_every_end_is_accounted_for(tmp_path):
    path = tmp_path / "attempts.jsonl"
    pids = []
    for resumed_from, exit_code in [(None, None), (100, 5), (200, None)]:
        process = multiprocessing.get_context("fork").Process(target=attempt, args=(path, resumed_from, exit_code))
        process.start()
        process.join()
        pids.append(process.pid)
    last = Attempt(path, 250)
    assert (last.number, last.killed) == (4, [3])
    last.ready(250)
    last.decide(251, "wait")
    last.end("finished", 0, {"training": 2.5})

    records = [json.loads(line) for line in path.read_text().splitlines()]
    starts = [record for record in records if record["event"] == "start"]
    ends = [record for record in records if record["event"] == "end"]
    assert [(start["attempt"], start["resumed_from"]) for start in starts] == [(1, None), (2, 100), (3, 200), (4, 250)]
    assert [start["pid"] for start in starts] == [*pids, os.getpid()]
    assert [(end["attempt"], end["reason"], end["exit_code"]) for end in ends] == [
        (1, "killed", None),
        (2, "non-finite gradients", 5),
        (3, "killed", None),
        (4, "finished", 0),
    ]
    assert [end["last_seen"] for end in ends if end["exit_code"] is None] == [starts[0]["time"], starts[2]["time"]]
    assert ends[-1]["seconds"] == {"training": 2.5}
    others = [record for record in records if record["event"] not in ("start", "end")]
    assert [(record["event"], record["attempt"], record["step"]) for record in others] == [
        ("ready", 4, 250),
        ("decision", 4, 251),
    ]
    times = [record["time"] for record in records if record["time"]]
    assert times == sorted(times)


def test_the_last_sign_of_a_killed_attempt_is_kept(tmp_path):
    path = tmp_path / "attempts.jsonl"
    Attempt(path, None)
    (begin,) = [json.loads(line)["time"] for line in path.read_text().splitlines()]
    Attempt(path, None, {"step": 7, "time": begin + 5})
    Attempt(path, None, {"step": 7, "time": begin - 5})
    ends = [record for record in map(json.loads, path.read_text().splitlines()) if record["event"] == "end"]
    assert [end["last_step"] for end in ends] == [7, None]
    assert ends[0]["last_seen"] == begin + 5
    assert ends[1]["last_seen"] > begin


def test_only_the_newest_attempt_may_go_on(tmp_path):
    path = tmp_path / "attempts.jsonl"
    older = Attempt(path, None)
    older.decide(1, "go on")
    older.check_newest()
    path.write_bytes(path.read_bytes() + b'{"event": "st')  # being written
    older.check_newest()
    newer = Attempt(path, 10)
    with pytest.raises(FencedError, match=f"Attempt 2 on .* has taken over {tmp_path}"):
        older.check_newest()
    before = path.read_bytes()
    older.end("finished", 0)
    assert path.read_bytes() == before
    newer.check_newest()


def test_a_line_torn_at_any_byte_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "attempts.jsonl"
    Attempt(path, None).end("finished", 0)
    first = path.read_bytes()
    Attempt(path, 10)
    second = path.read_bytes()[len(first) :]
    for torn in range(len(second)):
        path.write_bytes(first + second[:torn])
        assert (Attempt(path, 10).number, Attempt(path, 10).killed) == (2, [2])
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(record["event"], record["attempt"]) for record in records] == [
            ("start", 1),
            ("end", 1),
            ("start", 2),
            ("end", 2),
            ("start", 3),
        ]
