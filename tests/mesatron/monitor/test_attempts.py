"""The log of attempts, written by processes that end well, end badly, or are killed, against what happened to them."""

import json
import multiprocessing
import os

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
    last.end("finished", 0)

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
    times = [record["time"] for record in records if record["time"]]
    assert times == sorted(times)


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
