"""A half set up launch is refused instead of guessed; a decision of the first process is waited for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mesatron.errors import ConfigError, DataError
from mesatron.parallel import distributed


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself, a process without LOCAL_WORLD_SIZE would share one GPU with its whole node."""
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match=f"WORLD_SIZE is 2 but {missing} is not set"):
        distributed.start()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "3"}, "RANK is 3 but WORLD_SIZE 1; unset both"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 but WORLD_SIZE 2; unset both"),
        ({"RANK": ""}, "RANK is '', no number; unset it"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1', no number; unset it"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "cannot meet the 1 others at nowhere:99999 .port must"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": ""}, "cannot meet the 1 others at :2 "),
        ({"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS is 'x', no number; unset it"),
    ],
)
def test_what_another_launcher_left_is_named(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    usual = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "2"}
    for name, value in (usual | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=expected):
        distributed.start()


def test_processes_that_srun_started_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train the whole run by itself."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ConfigError, match="srun has started 4 processes that know nothing of each other"):
        distributed.start()


def test_a_lost_peer_is_told_from_a_fault_that_it_caused() -> None:
    """Whatever is being opened when the other process dies is not at fault, and a job may start again."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:747: Connection reset by peer")
    fault = DataError("Cannot open shards")
    fault.__cause__ = lost
    assert distributed.is_lost_peer(fault)
    assert not distributed.is_lost_peer(DataError("Cannot open shards"))


def test_a_decision_may_take_longer_than_a_collective(world: Callable) -> None:
    """As when the first process reads all shards for half an hour."""
    outcome = world(3, Path(__file__).with_name("slow_decision.py"))
    assert outcome.exit_codes == [0, 0, 0], outcome.errors
