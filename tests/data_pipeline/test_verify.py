"""`verify` against each kind of damage, one at a time; `inspect` against what was prepared."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mesatron_data.errors import DataError
from mesatron_data.inspect import inspect
from mesatron_data.manifest import load_manifest
from mesatron_data.verify import VERIFIED_FILE, verify, verify_once


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data", ignore=shutil.ignore_patterns("*.mds"))


def test_a_whole_folder(copy: Path) -> None:
    shards = list(copy.rglob("*.zstd"))
    report = verify(copy)
    assert report.shards == len(shards) > 3
    assert report.bytes == sum(shard.stat().st_size for shard in shards)
    assert report.samples == sum(split.samples for split in report.manifest.splits.values())
    assert verify(copy, contents=False).samples == report.samples


def test_verifying_once(copy: Path) -> None:
    """Files that stay as they were are not read again; a changed one is."""
    verify_once(copy)
    note = copy / VERIFIED_FILE
    before = note.read_bytes()
    verify_once(copy)
    assert note.read_bytes() == before
    damage(next(copy.rglob("*.zstd")))
    for _ in range(2):
        with pytest.raises(DataError, match="is damaged"):
            verify_once(copy)
    assert note.read_bytes() == before


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("contents", [True, False])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda folder: damage(folder / "train/shard.00001.mds.zstd"),
            r"train/shard.00001.mds.zstd is damaged \(SHA-1 \w+, expected \w+\)",
        ),
        (
            lambda folder: (folder / "validation/shard.00000.mds.zstd").unlink(),
            r"validation/shard.00000.mds.zstd cannot be read",
        ),
        (
            lambda folder: (folder / "train/shard.00000.mds.zstd").write_bytes(b"abc"),
            r"shard.00000.mds.zstd has 3 bytes, expected \d+",
        ),
        (lambda folder: (folder / "train/shard.00001.mds").write_bytes(b"stale"), r"train/shard.00001.mds has 5 bytes"),
        (lambda folder: damage(folder / "tokenizer.model"), "is not the tokenizer the data were made with"),
        (
            lambda folder: edit(folder / "train/index.json", lambda index: index["shards"].pop()),
            "not those of its manifest",
        ),
        (
            lambda folder: edit(folder / "manifest.json", lambda manifest: manifest.update(context_length=8)),
            "not those of its manifest",
        ),
        (
            lambda folder: edit(
                folder / "manifest.json", lambda manifest: manifest["splits"]["train"].update(samples=1)
            ),
            r"lists \d+ samples, but the manifest 1",
        ),
        (lambda folder: (folder / "train/index.json").unlink(), "No train/index.json"),
        (lambda folder: (folder / "manifest.json").unlink(), "No manifest.json"),
    ],
)
def test_each_damage_is_named(copy: Path, harm: Callable[[Path], None], message: str, contents: bool) -> None:
    harm(copy)
    with pytest.raises(DataError, match=message):
        verify(copy, contents=contents)


def test_inspecting_a_damaged_shard(copy: Path) -> None:
    next((copy / "train").glob("*.zstd")).write_bytes(b"no shard")
    with pytest.raises(DataError, match="cannot be read"):
        inspect(copy)


def test_inspection(prepared: Path, texts: dict[str, list[str]]) -> None:
    inspection = inspect(prepared, samples=5, tokens=400)
    manifest = load_manifest(str(prepared))
    assert inspection.manifest == manifest
    text = "".join(("|" if piece.begins else "") + piece.text for sample in inspection.samples[:1] for piece in sample)
    assert ("|" + "|".join(texts["train"])).startswith(text)
    assert inspection.samples[0][0].source == "RedPajamaBook"
    assert len(inspection.samples) == 5
    assert sum(share for _, share in inspection.frequent_tokens) == pytest.approx(1)
    assert len([share for _, share in inspection.frequent_tokens if share == 0]) == inspection.unused_tokens
    begun = manifest.splits["train"].documents
    targets = manifest.splits["train"].samples * manifest.context_length
    assert inspection.ignored_targets == pytest.approx((begun - 1) / targets, abs=2 / targets)
