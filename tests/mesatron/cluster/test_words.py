"""Last words: which node failed, and with which code, by what the processes could still say."""

from pathlib import Path

import pytest

from mesatron.cluster.words import FOLDER, LastWords, leave_word

NODES = ["n1", "n2", "n3"]


def words(folder: Path, monkeypatch: pytest.MonkeyPatch, said: dict[int, tuple[str, int]]) -> LastWords:
    monkeypatch.setenv(FOLDER, str(folder))
    for rank, (node, code) in said.items():
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("SLURMD_NODENAME", node)
        leave_word(code)
    (folder / "rank-99.json").write_text('{"node": "n1", "co')
    return LastWords.read(folder)


def test_the_node_with_a_silent_process_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on each: one of n2's was killed."""
    said = {0: ("n1", 8), 1: ("n1", 8), 2: ("n2", 8), 4: ("n3", 8), 5: ("n3", 8)}
    found = words(tmp_path, monkeypatch, said)
    assert found.silent(NODES, 2) == ["n2"]
    assert found.cause(consequence=8) is None


def test_where_all_are_silent_nobody_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words(tmp_path, monkeypatch, {}).silent(NODES, 2) == []


def test_the_cause_is_not_a_consequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = words(tmp_path, monkeypatch, {0: ("n1", 8), 1: ("n2", 6), 2: ("n3", 8)})
    assert found.cause(consequence=8) == 6
    assert found.silent(NODES, 1) == []


def test_nobody_asks_outside_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    leave_word(8)
    monkeypatch.setenv(FOLDER, str(tmp_path / "removed"))
    leave_word(8)
    assert list(tmp_path.iterdir()) == []
