"""A half set up launch is refused instead of guessed."""

import pytest

from mesatron.errors import ConfigError
from mesatron.parallel import distributed


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself, a process without LOCAL_WORLD_SIZE would share one GPU with its whole node."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match=f"WORLD_SIZE is 2 but {missing} is not set"):
        distributed.start()
