"""The progress line against the documented one, in a log and in a terminal."""

import io
import math
import re
import subprocess
import sys

from rich.console import Console

from mesatron.monitor.progress import Progress, Reading, plain_line

READING = Reading(120, loss=4.512, learning_rate=2.9e-3, grad_norm=0.83, tokens_per_second=5213, data_share=0.01)
FIELDS = "loss 4.512  ppl 91.1  lr 2.9e-03  grad 0.83  tok/s 5213  data 1%"


def test_the_documented_line():
    assert plain_line(READING, 600, 192.2) == f"step 120/600  {FIELDS}  eta 0:03:12"


def test_a_loss_beyond_all_perplexities_keeps_the_fields():
    for loss, shown in [(1e4, "loss 10000.000  ppl inf"), (math.nan, "loss nan  ppl nan"), (math.inf, "ppl inf")]:
        reading = Reading(1, loss, 1e-3, 0.5, 10, 0.0)
        assert shown in plain_line(reading, 2, 0)


def test_a_log_gets_whole_plain_lines_in_order():
    file = io.StringIO()
    with Progress(600, 100, Console(file=file, width=40)) as progress:
        progress.update(READING)
        progress.say("validation [loss] 4.4")
    first, second = file.getvalue().splitlines()
    assert re.fullmatch(re.escape(f"step 120/600  {FIELDS}  eta ") + r"\d:\d\d:\d\d", first)
    assert second == "validation [loss] 4.4"


def test_the_expected_time_is_that_of_the_steps_done_in_this_attempt(monkeypatch):
    clock = iter([1000.0, 1040.0])
    monkeypatch.setattr("mesatron.monitor.progress.time.monotonic", lambda: next(clock))
    file = io.StringIO()
    # The bar has a clock of its own.
    with Progress(600, 100, Console(file=file)) as progress:
        progress.update(READING)
    assert file.getvalue().endswith("eta 0:16:00\n")


def test_a_terminal_shows_the_same_fields_in_a_bar():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=160, color_system=None)
    with Progress(600, 100, console) as progress:
        progress.update(READING)
        progress.say("saved step 120")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "step 120/600" in text
    assert FIELDS in text
    assert "saved step 120" in text
    assert "eta 0:" in text


def test_a_full_disk_is_said_once_and_ends_nothing():
    program = "from mesatron.monitor.progress import Log; log = Log(); log.print('a'); log.print('b')"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    expected = "mesatron: the output cannot be written any more (No space left on device); the run goes on.\n"
    assert (done.returncode, done.stderr) == (0, expected)
