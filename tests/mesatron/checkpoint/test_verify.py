"""Damage of every kind against what verifying says of it: the file and the tensor by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mesatron.checkpoint.reader import CheckpointReader
from mesatron.checkpoint.verify import find_damage, find_latest, list_checkpoints, verify
from mesatron.errors import CheckpointError


def test_a_change_of_any_byte_is_found_and_its_file_named(tmp_path, save):
    path = save(tmp_path, 2, "1")
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), 5):
            changed = bytearray(content)
            changed[place] ^= 1
            file.write_bytes(changed)
            with pytest.raises(CheckpointError, match=file.name):
                verify(path)
        file.write_bytes(content)
    verify(path)


def test_the_tensor_of_a_changed_byte_is_named_by_verify_and_on_loading(tmp_path, save):
    path = save(tmp_path, 2, "1")
    manifest = json.loads((path / "manifest.json").read_text())
    checked = 0
    for kind, tensors in manifest["tensors"].items():
        for name, about in tensors.items():
            file = path / about["file"]
            content = file.read_bytes()
            header_bytes = int.from_bytes(content[:8], "little")
            first, last = json.loads(content[8 : 8 + header_bytes])[name]["data_offsets"]
            for place in {first, last - 1} if last > first else ():
                changed = bytearray(content)
                changed[8 + header_bytes + place] ^= 128
                file.write_bytes(changed)
                with pytest.raises(CheckpointError, match=f"{file.name} differs: tensor {name} has changed"):
                    verify(path)
                with pytest.raises(CheckpointError, match=f"{file.name} is damaged: tensor {name} has changed"):
                    CheckpointReader(path).tensor(kind, name)
                checked += 1
            file.write_bytes(content)
    assert checked > 20


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "missing file", "missing manifest", "no manifest", "renamed", "unreadable"]
)
def test_resuming_falls_back_and_says_why(tmp_path, save, damage):
    save(tmp_path, 10, "1")
    newest = save(tmp_path, 20, "1")
    weights = newest / "weights-00000.safetensors"
    match damage:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-9])
            status, reason = "damaged", "weights-00000.safetensors has"
        case "empty":
            weights.write_bytes(b"")
            status, reason = "damaged", "weights-00000.safetensors has 0 bytes instead of"
        case "missing file":
            weights.unlink()
            status, reason = "damaged", "weights-00000.safetensors is missing"
        case "missing manifest":
            (newest / "manifest.json").unlink()
            status, reason = "incomplete", "manifest.json is missing"
        case "no manifest":
            (newest / "manifest.json").write_text("[]")
            status, reason = "damaged", "manifest.json is damaged: it is no manifest"
        case "renamed":
            newest = newest.rename(tmp_path / "step-00000030")
            status, reason = "damaged", "holds step 20, not that of its name"
        case "unreadable":
            (newest / "manifest.json").unlink()
            (newest / "manifest.json").symlink_to("/proc/self/mem")  # to read its beginning is an input/output error
            status, reason = "unreadable", "manifest.json cannot be read (Input/output error)"
    with pytest.raises(OSError if status == "unreadable" else CheckpointError):
        verify(newest)
    latest, (skipped,) = find_latest(tmp_path)
    assert latest is not None
    assert latest.step == 10
    assert (skipped.path, skipped.status) == (newest, status)
    assert reason in skipped.reason
    assert [info.status for info in list_checkpoints(tmp_path)] == ["complete", status]


@pytest.mark.parametrize("name", ["optimizer-00001.safetensors", "state.json"])
def test_a_file_that_the_disk_does_not_give_back_is_named(tmp_path, save, monkeypatch, name):
    save(tmp_path, 10, "1")
    newest = save(tmp_path, 20, "1")
    real = Path.open

    def open_on_a_bad_disk(path, *arguments, **options):
        """As long as the file, but to read the beginning of a process's memory is an input/output error."""
        return real(Path("/proc/self/mem") if path == newest / name else path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_on_a_bad_disk)
    reason = f"{name} cannot be read (Input/output error)"
    assert find_damage(newest) == reason
    latest, (skipped,) = find_latest(tmp_path)
    assert latest is not None
    assert (latest.step, skipped.status, skipped.reason) == (10, "unreadable", reason)


def test_same_sizes_but_wrong_bytes_pass_the_cheap_check_only(tmp_path, save):
    save(tmp_path, 10, "1")
    state = save(tmp_path, 20, "1") / "state.json"
    state.write_text(state.read_text().replace("1", "2"))
    assert [info.status for info in list_checkpoints(tmp_path)] == ["complete", "complete"]
    assert [info.status for info in list_checkpoints(tmp_path, deep=True)] == ["complete", "damaged"]
    latest, (skipped,) = find_latest(tmp_path)
    assert latest is not None
    assert (latest.step, skipped.reason) == (10, "the checksum of state.json differs")


def test_each_file_that_was_read_is_a_sign_of_life(tmp_path, save):
    files = len(list(save(tmp_path, 5, "1").iterdir())) - 1  # but the manifest
    signs = []
    find_latest(tmp_path, alive=lambda: signs.append(1))
    find_damage(tmp_path / "step-00000005", lambda: signs.append(1))
    assert len(signs) == 2 * files > 6


def test_the_latest_link_is_not_needed(tmp_path, save):
    save(tmp_path, 10, "1")
    save(tmp_path, 20, "1")
    for target in ("step-00000010", "step-00000099", None):
        (tmp_path / "latest").unlink()
        if target:
            (tmp_path / "latest").symlink_to(target)
        latest, skipped = find_latest(tmp_path)
        assert latest is not None
        assert (latest.step, skipped) == (20, [])


def test_nothing_to_resume(tmp_path, save):
    assert find_latest(tmp_path / "none") == (None, [])
    shutil.rmtree(save(tmp_path, 1, "1"))
    assert find_latest(tmp_path) == (None, [])
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json"):
        CheckpointReader(tmp_path / "none")


def test_another_model_is_refused_by_its_first_difference(tmp_path, save, weights):
    reader = CheckpointReader(save(tmp_path, 1, "1"))
    model = {name: tuple(value.shape) for name, value in weights(1).items()}
    reader.check_model(model)
    with pytest.raises(CheckpointError, match=r"tensor head has shape \[3, 11\] there and \[3, 12\] in the model"):
        reader.check_model({**model, "head": (3, 12), "unused": (1,)})
    with pytest.raises(CheckpointError, match=r"tensor blocks\.1\.bias is not in it"):
        reader.check_model({**model, "blocks.1.bias": (5,)})
    with pytest.raises(CheckpointError, match="its tensor embedding is not in the model"):
        reader.check_model({name: shape for name, shape in model.items() if name != "embedding"})
    with pytest.raises(CheckpointError, match="has no optimizer tensor exp_avg/nothing"):
        reader.tensor("optimizer", "exp_avg/nothing")


def test_a_format_of_another_version_is_refused(tmp_path, save, monkeypatch):
    monkeypatch.setattr("mesatron.checkpoint.format.FORMAT_VERSION", 2)
    path = save(tmp_path, 1, "1")
    assert torch.is_tensor(CheckpointReader(path).tensor("weights", "head"))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 2, not 1"):
        CheckpointReader(path)
