"""`mesatron doctor run` against the training that it comes before: what the one would refuse, the other does."""

from collections.abc import Callable
from pathlib import Path

import pytest

import mesatron
from mesatron.cluster import preflight
from mesatron.config import load_config
from mesatron.errors import ConfigError

PROGRAM = Path(mesatron.__file__).with_name("__main__.py")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        ("model.gla.implementation", "fla", 2),
        ("data.folder", "{folder}/nowhere", 3),
        ("data.folder", "{folder}/failing", 11),
        ("data.context_length", 32, 3),
    ],
)
def test_a_fault_has_the_exit_code_that_training_gives_it(
    setting: str, value: str, code: int, processes: int, tmp_path: Path, tiny_config: Callable, world: Callable
) -> None:
    """fla-core has no kernel of GLA in fp32, with a GPU or without."""
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing/manifest.json").symlink_to("/proc/self/mem")  # to read its beginning is an input/output error
    value = value.format(folder=tmp_path) if isinstance(value, str) else value
    config = tiny_config(tmp_path, **{"model.mixer": "gla", setting: value})
    for verb in (["doctor", "run"], ["train"]):
        outcome = world(processes, PROGRAM, *verb, config)
        assert outcome.exit_code == code, outcome.errors
        assert len(outcome.error_lines) == 1, outcome.errors


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_place_that_is_not_told_is_not_guessed(
    missing: str, tmp_path: Path, tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of a node would look at its first GPU, which training refuses."""
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match=f"WORLD_SIZE is 2 but {missing} is not set"):
        preflight.run(load_config(tiny_config(tmp_path)), 5)
