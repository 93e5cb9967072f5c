"""The core of `mesatron prove`: real trainings in layouts of 2 to 4 processes against one process, of Mesa in many
layouts and of every mixer in those in which mixers differ.

Loss and gradient norm of every step, every gradient of the first and every weight after the last, fp32, to rounding;
vocabulary, sequences and documents divide by nothing, and documents cross and end inside what processes hold. The
other layouts of the table run with the command. That the comparison can fail is checked with one changed number.
"""

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from mesatron.config import load_config
from mesatron.prove.layouts import Case
from mesatron.prove.table import Prover, compare, table
from mesatron.prove.worlds import WorldFailed, run_world

STEPS = 3


@pytest.fixture(scope="module")
def prover(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServerContext) -> Prover:
    return Prover(fork_server, tmp_path_factory.mktemp("prove") / "folder", STEPS, vocabulary_size=211)


@pytest.fixture(scope="module")
def mixed_prover(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServerContext) -> Prover:
    """One layer of every mixer besides Mesa."""
    mixers = ["gla", "gated_deltanet", "mlstm", "hawk", "transformer", "swa-40", "deltanet", "mamba2", "mesa_rls"]
    return Prover(fork_server, tmp_path_factory.mktemp("mixed") / "folder", STEPS, vocabulary_size=211, mixer=mixers)


@pytest.mark.parametrize(
    "case",
    [
        Case(tensor=4, sequence_parallel=True, documents=True),
        Case(tensor=2, data=2, zero_stage=0),
        Case(tensor=2, data=2, zero_stage=2, documents=True, offload=True, recompute="selective"),
        Case(tensor=2, data=2, zero_stage=3, sequence_parallel=True, documents=True),
        Case(context=4, documents=True, micro_batch=3),
        Case(context=2, data=2, zero_stage=3),
        Case(tensor=2, context=2, sequence_parallel=True),
        Case(pipeline=3, documents=True),
        Case(tensor=2, pipeline=2, sequence_parallel=True, documents=True, micro_batch=3),
        Case(context=2, pipeline=2, recompute="full"),
    ],
    ids=lambda case: case.name,
)
def test_a_layout_equals_one_process(prover: Prover, case: Case) -> None:
    lines: list[str] = []
    assert table(prover, [case], lines.append, lines.append), lines
    assert case.name in lines[1]


@pytest.mark.parametrize(
    "case",
    [
        Case(tensor=2, sequence_parallel=True, documents=True),
        Case(context=2, documents=True, micro_batch=3),
        Case(context=2),
        Case(pipeline=2, documents=True),
    ],
    ids=lambda case: case.name,
)
def test_every_mixer_in_a_layout_equals_one_process(mixed_prover: Prover, case: Case) -> None:
    lines: list[str] = []
    assert table(mixed_prover, [case], lines.append, lines.append), lines


def test_every_mixer_of_a_pattern_is_built(tmp_path: Path, fork_server: ForkServerContext) -> None:
    pattern = ["hawk_mesa", "swa-4", "gla"]
    prover = Prover(fork_server, tmp_path / "folder", 1, vocabulary_size=32, mixer=pattern)
    assert load_config(prover.config).model.used_mixers == ["hawk", "mesa", "swa", "gla"]


def test_a_difference_is_seen(prover: Prover) -> None:
    case = Case()
    trace = prover.traces.get(case) or prover.trace(case)
    assert len(trace.losses) - 2 == len(trace.norms) == STEPS
    assert len(trace.gradients) == len(trace.weights) > 50
    assert compare(case, trace, trace).holds
    name = "blocks.2.mixer.gamma.weight"
    bent = trace.weights[name].clone()
    bent.view(-1)[0] += 1e-4 * bent.norm()
    assert compare(case, replace(trace, weights=trace.weights | {name: bent}), trace).weight[1] == name
    for changed in (
        replace(trace, weights=trace.weights | {name: bent}),
        replace(trace, losses=[*trace.losses[:-1], trace.losses[-1] * 1.0001]),
        replace(trace, norms=[trace.norms[0] * 1.0001, *trace.norms[1:]]),
        replace(trace, losses=[*trace.losses[:-1], math.nan]),
        replace(trace, norms=[*trace.norms[:-1], math.nan]),
        replace(trace, gradients=trace.gradients | {f"exp_avg/{name}": bent * math.nan}),
        replace(trace, weights=trace.weights | {name: bent * math.inf}),
    ):
        assert not compare(case, changed, trace).holds
        assert not compare(case, trace, changed).holds
    nothing = replace(trace, weights=trace.weights | {name: bent * 0})
    assert compare(case, nothing, nothing).holds
    assert not compare(case, trace, nothing).holds
    for other in (replace(trace, checksums=[0.0] * STEPS), replace(trace, weights={})):
        with pytest.raises(WorldFailed):
            compare(case, other, trace)


def test_the_table_goes_on_after_a_layout_that_fails(prover: Prover) -> None:
    """Five sequences do not go into batches of twelve; one process equals itself."""
    shown: list[str] = []
    logs: list[str] = []
    begun: list[tuple[int, str, int]] = []
    failing = Case(data=2, micro_batch=5)
    cases = [failing, Case()]
    assert not table(prover, cases, shown.append, logs.append, lambda *place: begun.append((*place, len(shown))))
    assert begun == [(0, failing.name, 1), (1, Case().name, 2)], "each is named before its row"
    assert shown[1].startswith(f"{failing.name} ")
    assert " FAILED: Process " in shown[1]
    assert shown[2].endswith("  equal")
    assert [f"process {rank} in {failing.name}" in log for rank, log in enumerate(logs)] == [True, True]
    # The first to fail says why; the other may have been cut short before it came so far.
    assert any("12 = " in log for log in logs)


def test_a_world_that_fails_gives_its_last_words(prover: Prover, tmp_path: Path) -> None:
    arguments = ["train", str(prover.config), "name=failing", "parallel.data_size=5"]
    with pytest.raises(WorldFailed, match=r"Process \d of 2 ended with 2: .*calls for 5 processes, not 2"):
        run_world(prover.context, 2, arguments, tmp_path, seconds=60)


ENDLESS = ["train.steps=1000000", "checkpoint.every_steps=1000000", "evaluate.every_steps=1000000"]


def test_a_world_that_does_not_end_in_time_shows_where_it_was(prover: Prover, tmp_path: Path) -> None:
    with pytest.raises(WorldFailed, match=r"Process \d of 2 did not end in 3 s: ") as failure:
        run_world(prover.context, 2, ["train", str(prover.config), "name=endless", *ENDLESS], tmp_path, seconds=3)
    for lines in failure.value.logs:
        begin = max(number for number, line in enumerate(lines) if line.endswith("(most recent call first):"))
        assert any("mesatron/cli.py" in line and line.endswith(" in train") for line in lines[begin:]), lines


def test_a_world_ends_with_who_runs_it(prover: Prover, tmp_path: Path, short_path: Path) -> None:
    script = (
        "import multiprocessing, pathlib, sys; from mesatron.prove.worlds import run_world;"
        "context = multiprocessing.get_context('forkserver'); folder = pathlib.Path(sys.argv.pop());"
        "run_world(context, 1, sys.argv[1:], folder, 60)"
    )
    arguments = ["train", str(prover.config), "name=orphan", *ENDLESS, str(tmp_path)]
    environment = os.environ | {"TMPDIR": str(short_path)}  # where a killed fork server leaves its socket
    parent = subprocess.Popen([sys.executable, "-c", script, *arguments], start_new_session=True, env=environment)
    try:
        while not (tmp_path / "rank-0.log").exists():
            assert parent.poll() is None
            time.sleep(0.05)
        assert len(_session(parent.pid)) >= 3  # it, the fork server and the worker
        parent.kill()
        parent.wait()
        until = time.monotonic() + 10
        while left := _session(parent.pid):
            assert time.monotonic() < until, left
            time.sleep(0.05)
    finally:
        for process in _session(parent.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _session(leader: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(session) == leader and state != "Z":
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("name", [pytest.param("t", marks=pytest.mark.long), 100 * "t"])
def test_the_verb_runs_and_leaves_nothing_in_any_temporary_folder(name: str, tmp_path: Path, short_path: Path) -> None:
    """One where its sockets are, and one whose path is too long for them."""
    temporary = short_path / name
    temporary.mkdir()
    command = [sys.executable, "-m", "mesatron", "prove", str(tmp_path / "proof"), "--processes=2", "--steps=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    done = subprocess.run(
        [*command, "--layout=DP2, ZeRO-1"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("equal")
    assert not list(temporary.glob("pymp-*"))
