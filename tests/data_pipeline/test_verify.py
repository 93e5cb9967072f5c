"""`verify` against each kind of damage, one at a time; `inspect` and its page against what was prepared."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mesatron_data.errors import DataError
from mesatron_data.inspect import inspect
from mesatron_data.manifest import load_manifest
from mesatron_data.mds import read_samples, shard_files
from mesatron_data.page import page
from mesatron_data.plan import Options
from mesatron_data.shards import prepare
from mesatron_data.verify import VERIFIED_FILE, verify, verify_once


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "data", ignore=shutil.ignore_patterns("unpacked"))


def test_a_whole_folder(copy: Path) -> None:
    shards = list(copy.rglob("*.zstd"))
    report = verify(copy)
    assert report.shards == len(shards) > 3
    assert report.bytes == sum(shard.stat().st_size for shard in shards)
    assert report.samples == sum(split.samples for split in report.manifest.splits.values())


def test_shards_that_stay_as_they_were_are_not_read_again(copy: Path) -> None:
    """A changed one is, as are all of a copy; preparing and a full verification note all, other files do not matter."""
    shards, read = len(list(copy.rglob("*.zstd"))), Counter[str]()
    verify_once(copy, lambda: read.update(["copied"]))
    verify_once(copy, lambda: read.update(["known"]))
    (copy / "notes.txt").write_text("mine")
    (copy / "train/notes.zstd").write_text("mine")
    verify_once(copy, lambda: read.update(["beside other files"]))
    next(copy.rglob("shard*.zstd")).touch()
    verify_once(copy, lambda: read.update(["touched"]))
    (copy / VERIFIED_FILE).unlink()
    verify(copy)
    verify_once(copy, lambda: read.update(["verified"]))
    (copy / VERIFIED_FILE).write_text("[]")
    verify_once(copy, lambda: read.update(["without a note"]))
    assert read == {"copied": shards, "touched": 1, "without a note": shards}


def test_what_was_just_prepared_is_not_read_again(prepare_texts: Callable[..., Path]) -> None:
    folder, read = prepare_texts(["of and to in a is that"] * 20), Counter[str]()
    verify_once(folder, lambda: read.update(["prepared"]))
    assert not read


def test_a_killed_verification_is_gone_on_with(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesatron_data.verify.NOTE_SECONDS", 0)
    shards, read = len(list(copy.rglob("*.zstd"))), Counter[str]()

    def read_until_killed() -> None:
        read.update(["first"])
        if read["first"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_once(copy, read_until_killed)
    verify_once(copy, lambda: read.update(["then"]))
    assert read == {"first": 3, "then": shards - 2}


def test_damage_is_found_whenever_it_comes(copy: Path) -> None:
    verify_once(copy)
    before = (copy / VERIFIED_FILE).read_bytes()
    damage(next(copy.rglob("*.zstd")))
    for _ in range(2):
        with pytest.raises(DataError, match="is damaged"):
            verify_once(copy)
    assert (copy / VERIFIED_FILE).read_bytes() == before


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def make_older(folder: Path) -> None:
    """Take from the manifest the hashes that older versions did not write."""
    edit(folder / "manifest.json", lambda manifest: [manifest.pop(name) for name in ("sha256", "index_sha256")])


@pytest.mark.parametrize("check", [verify, verify_once])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda folder: damage(folder / "train/shard.00001.mds.zstd"),
            r"train/shard.00001.mds.zstd is damaged \(SHA-1 \w+, expected \w+\)",
        ),
        (
            lambda folder: (folder / "validation/shard.00000.mds.zstd").unlink(),
            r"Cannot read shard .*validation/shard.00000.mds.zstd: No such file",
        ),
        (
            lambda folder: (folder / "train/shard.00000.mds.zstd").write_bytes(b"abc"),
            r"shard.00000.mds.zstd has 3 bytes, expected \d+",
        ),
        (lambda folder: damage(folder / "tokenizer.model"), "is not the tokenizer the data were made with"),
        (
            lambda folder: edit(folder / "train/index.json", lambda index: index["shards"].pop()),
            r"train/index.json is not that of its manifest \(SHA-256 \w+, expected \w+\)",
        ),
        (
            lambda folder: edit(folder / "manifest.json", lambda manifest: manifest.update(bos_id=8)),
            r"manifest.json is damaged \(SHA-256 \w+, expected \w+\)",
        ),
        (lambda folder: (folder / "train/index.json").unlink(), "No train/index.json"),
        (lambda folder: (folder / "manifest.json").unlink(), "No manifest.json"),
    ],
)
def test_each_damage_is_named(
    copy: Path, harm: Callable[[Path], None], message: str, check: Callable[[Path], object]
) -> None:
    harm(copy)
    with pytest.raises(DataError, match=message):
        check(copy)


def test_a_damaged_unpacked_shard_is_named(copy: Path) -> None:
    shards = copy / "unpacked" / load_manifest(str(copy)).unpacked_name / "train"
    shards.mkdir(parents=True)
    (shards / "shard.00001.mds").write_bytes(b"stale")
    with pytest.raises(DataError, match=r"unpacked/\w+/train/shard.00001.mds has 5 bytes"):
        verify(copy)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train/index.json", lambda index: index["shards"].pop(), "not those of its manifest"),
        ("manifest.json", lambda manifest: manifest.update(bos_id=8), "not those of its manifest"),
        (
            "manifest.json",
            lambda manifest: manifest["splits"]["train"].update(samples=1),
            r"lists \d+ samples, but the manifest 1",
        ),
        ("manifest.json", lambda manifest: manifest["splits"].pop("train"), r"manifest.json is damaged \('train'\)"),
    ],
)
def test_damage_to_a_folder_of_an_older_version(
    copy: Path, name: str, change: Callable[[dict], object], message: str  # type: ignore[type-arg]
) -> None:  # fmt: skip
    make_older(copy)
    assert verify(copy).samples
    edit(copy / name, change)
    with pytest.raises(DataError, match=message):
        verify(copy)


@pytest.mark.parametrize("name", ["manifest.json", "train/index.json", "validation/index.json"])
@pytest.mark.parametrize("older", [False, True])
def test_a_flipped_bit_of_a_description_is_found(copy: Path, name: str, older: bool) -> None:
    """Any bit is; in a folder of an older version, which lacks some hashes, at least nothing else is raised."""
    if older:
        make_older(copy)
    path, draw = copy / name, random.Random(f"{name} {older}")
    good = path.read_bytes()
    for _ in range(400):
        damaged = bytearray(good)
        damaged[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        found = ""
        try:
            shard_files(copy, load_manifest(str(copy)))
        except DataError as error:
            found = str(error)
        assert older or found, damaged
        assert "\n" not in found


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
    assert sum(inspection.token_counts) == targets
    assert len(inspection.token_counts) == manifest.vocabulary_size - inspection.unused_tokens
    assert sum(inspection.pieces.values()) == manifest.splits["train"].samples
    pieces = [len(sample.document_starts) for sample in read_samples(prepared, "train")]
    assert inspection.pieces == {number: pieces.count(number) for number in sorted(set(pieces))}


def test_what_is_looked_at_is_spread_over_data_packed_by_source(
    records: Path, tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(by_source=True)
    prepare(str(records), tmp_path / "data", tokenizer_path, 16, shard_bytes=1000, options=options)
    every = [sample.tokens.tolist() for sample in read_samples(tmp_path / "data", "train")]
    for most in (1, 100, len(every) - 1, len(every)):
        some = [sample.tokens.tolist() for sample in read_samples(tmp_path / "data", "train", most)]
        assert some == every[:: -(-len(every) // most)]
    monkeypatch.setattr("mesatron_data.inspect.MOST_SAMPLES", 100)
    monkeypatch.setattr("mesatron_data.inspect.MOST_SHARDS", 30)
    inspection = inspect(tmp_path / "data", samples=1000)
    sources = [sample[0].source for sample in inspection.samples]
    assert 50 < len(sources) == sum(inspection.pieces.values()) <= 100
    samples = inspection.manifest.splits["train"].source_samples
    assert len(samples) == 3
    for name, count in samples.items():
        assert sources.count(name) / len(sources) == pytest.approx(count / sum(samples.values()), abs=0.05)


class Outline(HTMLParser):
    """Text, widths of bars and the balance of tags of a page."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.text, self.bars, self.open = "", [], []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "rect":
            self.bars.append(float(dict(attributes)["width"] or 0))
        assert not {"src", "href"} & {name for name, _ in attributes}
        if tag not in ("meta", "rect", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "polyline"):
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_by_itself_and_shows_what_was_found(prepared: Path) -> None:
    found = inspect(prepared, samples=3)
    outline = Outline(page(str(prepared), found))
    assert outline.open == []
    for sample in found.samples:
        for piece in sample:
            assert f"{piece.source}, {'document begins' if piece.begins else 'continued'}" in outline.text
            assert piece.text in outline.text
    assert found.manifest.fingerprint[:12] in outline.text
    counts = list(found.manifest.splits["train"].document_lengths.values())
    sources = len(found.manifest.splits["train"].sources)
    drawn = outline.bars[sources : sources + len(counts)]
    assert drawn == pytest.approx([400 * count / max(counts) for count in counts], abs=0.1)
    odd = found.samples[0][0].__class__(found.manifest.sources[0], True, "<script>alert(1)</script>\0\r&amp;")
    outline = Outline(page("<b>", replace(found, samples=[[odd]])))
    assert "<script>alert(1)</script>\u2400\u240d&amp;" in outline.text
