"""Checkpoints on nodes: a run that goes on from one equals a run never cut, and what is not whole is passed over.

Runs save locally after steps 2, 4 and 6 and are stopped after step 7. Whatever the shared checkpoint of that step would
give is removed, so that the local one of step 6 is the newest. Processes on one machine keep apart what nodes would.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mesatron_data.synthetic import write_shards

from mesatron.monitor.attempts import Attempt
from mesatron.train.local import is_given_up
from mesatron.train.spikes import Rewind, Skipped

SABOTAGE = Path(__file__).with_name("sabotage.py")
EVEN = {"model.width": 24, "model.layers": 3, "model.heads": 4, "model.head_dim": 6, "model.mlp_ratio": 1.5}


class Case:
    """A run with local checkpoints, stopped after step 7 of 9."""

    def __init__(self, folder: Path, write: Callable, data: Path, train: Callable, run_of: Callable, processes: int,
                 **settings: Any) -> None:  # fmt: skip
        self.train, self.processes, self.local = train, processes, folder / "nodes"
        settings = {
            "train.steps": 9, "train.global_batch_size": 12, "train.micro_batch_size": 1, "checkpoint.every_steps": 100,
        } | settings  # fmt: skip
        self.config = write(
            folder / "cut", data, **settings,
            **{"checkpoint.local_folder": str(self.local), "checkpoint.local_every_steps": 2},
        )  # fmt: skip
        self.run = run_of(self.config)
        outcome = train(processes, self.config, "--stop-at-step=7")
        assert outcome.exit_code == 75, outcome.errors
        shutil.rmtree(self.run.checkpoint(7))

    def parts(self, step: int) -> list[Path]:
        return sorted(self.local.glob(f"tiny-*/rank-*/step-{step:08d}"))

    def resume(self, *options: str) -> str:
        outcome = self.train(self.processes, self.config, *options)
        assert outcome.exit_code == 0, outcome.errors
        return outcome.output

    def resumed_from(self) -> int | None:
        return [record["resumed_from"] for record in self.run.attempts() if record["event"] == "start"][-1]


@pytest.fixture(scope="module")
def even_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences of 22 tokens, which context and sequence parallelism can halve; vocabulary 101."""
    return write_shards(tmp_path_factory.mktemp("even") / "shards", 101, 22, {"train": 120, "validation": 9}, seed=6)


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (3, {"parallel.zero_stage": 0}),
        (2, {"parallel.zero_stage": 1, "train.precision": "bf16"}),
        (3, {"parallel.zero_stage": 3, "train.precision": "bf16"}),
        pytest.param(4, EVEN | {"parallel.tensor_size": 2, "parallel.zero_stage": 1}, marks=pytest.mark.long),
        (2, EVEN | {"parallel.pipeline_size": 2}),
    ],
    ids=["ZeRO-0", "ZeRO-1", "ZeRO-3", "TP2xDP2", "PP2"],
)
def test_a_run_that_goes_on_from_nodes_equals_one_never_cut(
    processes: int, settings: dict[str, Any], tmp_path: Path, odd_config: Callable, even_data: Path, train: Callable,
    run_of: Callable,
) -> None:  # fmt: skip
    case = Case(tmp_path, odd_config, even_data, train, run_of, processes, **settings)
    assert len(case.parts(6)) == len(case.parts(4)) == processes
    assert case.parts(2) == []
    output = case.resume()
    assert f"continues {case.parts(6)[0]}" in output
    assert case.resumed_from() == 6

    whole = tmp_path / "whole"
    shutil.copytree(case.config.parent, whole)
    shutil.rmtree(whole / "runs")
    config = whole / "config.yaml"
    config.write_text(config.read_text().replace(str(case.config.parent), str(whole)))
    assert train(processes, config, "checkpoint.local_folder=null", "checkpoint.local_every_steps=0").exit_code == 0
    assert case.run.checksums(9) == run_of(config).checksums(9)
    for tag in ("train/loss", "train/grad_norm", "data/samples_checksum"):
        assert case.run.curve(tag) == run_of(config).curve(tag)


def test_only_what_all_processes_have_whole_is_taken(
    tmp_path: Path, odd_config: Callable, even_data: Path, train: Callable, run_of: Callable
) -> None:
    case = Case(tmp_path, odd_config, even_data, train, run_of, 2)
    saved = tmp_path / "saved"
    for name in ("cut", "nodes"):
        shutil.copytree(tmp_path / name, saved / name, symlinks=True)

    def again() -> None:
        for name in ("cut", "nodes"):
            shutil.rmtree(tmp_path / name)
            shutil.copytree(saved / name, tmp_path / name, symlinks=True)

    shutil.rmtree(case.parts(6)[1])
    assert "Passing over what some processes have of the local checkpoint of step 6" in case.resume()
    assert case.resumed_from() == 4
    assert {len(case.parts(step)) for step in (6, 8)} == {2}

    again()
    (file,) = case.parts(6)[1].glob("optimizer-*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert f"Passing over {case.parts(6)[1]}: the checksum of {file.name} differs" in case.resume()
    assert case.resumed_from() == 4

    again()
    assert "continues" not in case.resume("parallel.zero_stage=2"), "another layout cannot use them"
    assert case.resumed_from() is None

    again()
    shutil.rmtree(case.run.path)
    case.resume()
    assert case.resumed_from() is None, "a new run of the same name has nothing to do with them"

    again()
    outcome = train(1, case.config)
    assert outcome.exit_code == 0
    assert case.resumed_from() is None, "neither can another number of processes"


def test_what_a_later_attempt_has_given_up_is_not_taken(
    tmp_path: Path, odd_config: Callable, even_data: Path, train: Callable, run_of: Callable
) -> None:
    """It went on from an earlier step on other nodes, whose local checkpoints alone it could remove."""
    case = Case(tmp_path, odd_config, even_data, train, run_of, 2)
    elsewhere = train(2, case.config, f"checkpoint.local_folder={tmp_path}/others", "--stop-at-step=5")
    assert elsewhere.exit_code == 75, elsewhere.errors
    assert case.parts(6) != []
    assert f"continues {case.run.checkpoint(5)}" in case.resume()
    assert len(case.run.curve("train/loss")) == 9


@pytest.mark.parametrize(
    ("start", "rewind", "expected"),
    [(6, None, False), (5, None, True), (6, 5, True), (6, 6, False), (None, None, True)],
)
def test_a_step_is_given_up_by_a_later_start_or_rewind(
    start: int | None, rewind: int | None, expected: bool, tmp_path: Path
) -> None:
    for resumed_from in (None, start):
        Attempt(tmp_path / "attempts.jsonl", resumed_from)
    if rewind:
        Skipped.read(tmp_path).add(tmp_path, Rewind(rewind + 1, 8, rewind, [], [], "attempt-0002"))
    assert is_given_up(tmp_path, 6, "attempt-0001") == expected
    assert not is_given_up(tmp_path, 6, "attempt-0002")


def test_what_was_restored_is_mapped_no_more(
    tmp_path: Path, odd_config: Callable, even_data: Path, train: Callable, run_of: Callable, world: Callable
) -> None:
    """A checkpoint in a node's memory would take it for as long as the attempt lives."""
    case = Case(tmp_path, odd_config, even_data, train, run_of, 2)
    outcome = world(2, SABOTAGE, "mapped=7", "train", case.config)
    assert outcome.exit_code == 0, outcome.errors
    assert case.resumed_from() == 6


def test_the_newer_of_shared_and_local_is_taken(
    tmp_path: Path, odd_config: Callable, even_data: Path, train: Callable, run_of: Callable
) -> None:
    settings = {"checkpoint.every_steps": 3}
    case = Case(tmp_path, odd_config, even_data, train, run_of, 2, **settings)
    assert case.parts(6) == [], "step 6 is saved for all"
    assert case.run.steps() == [3, 6]
    outcome = train(2, case.config, "--stop-at-step=7")
    assert f"continues {case.run.checkpoint(6)}" in outcome.output
    for step in (6, 7):
        shutil.rmtree(case.run.checkpoint(step))
    assert f"continues {case.parts(4)[0]}" in case.resume()
    assert [record["resumed_from"] for record in case.run.attempts() if record["event"] == "start"] == [None, 6, 4]
    state = json.loads((case.parts(8)[0] / "state.json").read_text())
    assert (state["step"], state["attempt"]) == (8, "attempt-0003")


FULL_NODE = """
import resource, sys
from pathlib import Path
import torch
from mesatron.checkpoint.tensors import Fragment, TensorSpec
from mesatron.config.schema import CheckpointConfig
from mesatron.parallel.distributed import World
from mesatron.train.local import LocalSaver
from mesatron.train.saver import Hooks
values, size = torch.zeros(100_000), 100_000
saver = LocalSaver(
    Path(sys.argv[1]), CheckpointConfig(), World(0, 1, torch.device("cpu")), "1",
    {"weights": [TensorSpec("a", (size,))]}, lambda: [Fragment.whole("weights", "a", values)],
    Hooks(lambda: None, lambda words: None, lambda: None),
)
with saver:
    saver.save(1, [], {}, {})
    saver.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    for step in (2, 3, 4):
        saver.save(step, [], {}, {})
sys.exit(0 if saver.given_up else 1)
"""


def test_a_full_node_ends_local_checkpoints_but_not_the_run(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_NODE, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "latest"}
    (line,) = done.stderr.splitlines()
    assert line.startswith("mesatron: No space left to write ")
