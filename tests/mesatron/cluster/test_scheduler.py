"""What a job does while Slurm's controller is away; tests/slurm has the real one."""

import pytest

from mesatron.cluster import scheduler
from mesatron.cluster.scheduler import UnansweredError, patiently
from mesatron.errors import ConfigError


def test_only_what_is_not_answered_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0)
    answers: list[str | ConfigError] = [UnansweredError("Slurm does not answer"), UnansweredError("nor now"), "yes"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    assert patiently(ask) == "yes"
    assert capsys.readouterr().err == "mesatron: Slurm does not answer; asked again for 600 s.\n"
    answers += [ConfigError("Slurm refuses"), "not asked for"]
    with pytest.raises(ConfigError, match="Slurm refuses"):
        patiently(ask)
    monkeypatch.setattr(scheduler, "PATIENCE_SECONDS", 0)
    answers[:] = [UnansweredError("Slurm does not answer"), "not asked for"]
    with pytest.raises(UnansweredError):
        patiently(ask)
