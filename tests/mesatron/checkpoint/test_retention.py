"""Which checkpoints are kept, against the rule written out by hand, and which leftovers go, at once or later."""

import errno
import os

import pytest

from mesatron.checkpoint.retention import prune, remove_leftovers
from mesatron.checkpoint.verify import list_checkpoints


@pytest.mark.parametrize(
    ("saved_step", "keep_last", "keep_every_steps", "kept"),
    [
        (60, 1, None, {60}),
        (60, 2, None, {50, 60}),
        (60, 9, None, {10, 20, 30, 40, 50, 60}),
        (60, 1, 20, {20, 40, 60}),
        (60, 2, 30, {30, 50, 60}),
        (30, 1, None, {30, 40, 50, 60}),
        (30, 2, 10, {10, 20, 30, 40, 50, 60}),
    ],
)
def test_the_last_few_and_every_nth_stay(tmp_path, save, saved_step, keep_last, keep_every_steps, kept):
    for step in range(10, 70, 10):
        save(tmp_path, step, "1", world_size=1)
    assert prune(tmp_path, saved_step, keep_last, keep_every_steps, "1") == []
    infos = list_checkpoints(tmp_path, deep=True)
    assert {info.step for info in infos} == kept
    assert all(info.status == "complete" for info in infos)


def test_damaged_checkpoints_neither_count_nor_go(tmp_path, save):
    for step in (10, 20, 30):
        save(tmp_path, step, "1", world_size=1)
    (tmp_path / "step-00000020" / "state.json").unlink()
    assert prune(tmp_path, 30, 2, None, "1") == []
    prune(tmp_path, 30, 1, None, "1")
    assert {info.step: info.status for info in list_checkpoints(tmp_path)} == {20: "damaged", 30: "complete"}


def test_only_the_dead_attempts_folders_of_the_known_names_go(tmp_path, save):
    save(tmp_path, 10, "1")
    gone = [".incomplete-step-00000020-1", ".trash-step-00000005-1", ".trash-step-00000005-1-2"]
    stay = [
        ".incomplete-step-00000030-2",
        "damaged-step-00000010-1",
        ".incomplete-notes",
        "incomplete-step-00000020-1",
        ".incomplete-step-20-1",
    ]
    for name in gone + stay:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".trash-step-00000006-1").write_text("a file")
    (tmp_path / ".trash-step-00000007-1").symlink_to(tmp_path / "step-00000010")
    stay += [".trash-step-00000006-1", ".trash-step-00000007-1", "step-00000010", "latest"]
    assert remove_leftovers(tmp_path, "2") == []
    assert {path.name for path in tmp_path.iterdir()} == set(stay)
    assert remove_leftovers(tmp_path / "none", "2") == []


def test_what_cannot_be_removed_yet_goes_at_the_next_start(tmp_path, save, monkeypatch):
    """Unlinking renames, as on NFS for a file that a process maps, so that the folder does not get empty."""
    for step in (10, 20):
        save(tmp_path, step, "1", world_size=1)
    (tmp_path / ".incomplete-step-00000005-0").mkdir()
    (tmp_path / ".incomplete-step-00000005-0/weights-00000.safetensors").write_bytes(b"half")

    def keep_mapped(name, dir_fd=None):
        os.rename(name, f".nfs-{os.path.basename(name)}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    left = [tmp_path / ".incomplete-step-00000005-0", tmp_path / ".trash-step-00000010-1"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", keep_mapped)
        assert remove_leftovers(tmp_path, "1") == left[:1]
        assert prune(tmp_path, 20, 1, None, "1") == left[1:]
    assert {info.step: info.status for info in list_checkpoints(tmp_path)} == {
        5: "incomplete", 10: "incomplete", 20: "complete",
    }  # fmt: skip
    assert remove_leftovers(tmp_path, "2") == []
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000020", "latest"}


def test_a_checkpoint_that_cannot_be_renamed_is_removed_later(tmp_path, save, monkeypatch):
    for step in (10, 20):
        save(tmp_path, step, "1", world_size=1)

    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        assert prune(tmp_path, 20, 1, None, "1") == [tmp_path / "step-00000010"]
    assert prune(tmp_path, 20, 1, None, "1") == []
    assert [info.step for info in list_checkpoints(tmp_path)] == [20]
