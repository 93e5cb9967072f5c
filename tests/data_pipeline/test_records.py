"""Reading records: what comes out of odd and damaged files, against the documents and counts expected."""

import gzip
import json
import os
from pathlib import Path

import pytest
import zstandard
from mesatron_data.errors import DataError
from mesatron_data.records import Counts, check_skipped, check_truncated, list_files, read_documents


def line(text: object, source: object = "RedPajamaBook") -> bytes:
    return json.dumps({"text": text, "meta": {"redpajama_set_name": source}}).encode() + b"\n"


def read(folder: Path) -> tuple[list[tuple[str, str, int]], Counts]:
    counts = Counts()
    documents = []
    for file in list_files(str(folder), "train"):
        documents += [(document.text, document.file, document.line) for document in read_documents(file, counts)]
    return documents, counts


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (tmp_path / "train").mkdir()
    return tmp_path / "train"


def test_each_unusable_record_is_counted_with_its_place(train: Path) -> None:
    lines = [
        line("first"),
        line(""),
        line(" \n\t\u2003"),
        b"{broken\n",
        b'{"meta": {}}\n',
        line(7),
        b'["text"]\n',
        b'{"text": "caf\xe9"}\n',
        b"\n",
        b"[" * 100_000 + b"\n",
        line("last"),
    ]
    (train / "a.jsonl").write_bytes(b"".join(lines))
    documents, counts = read(train.parent)
    assert documents == [("first", "train/a.jsonl", 1), ("last", "train/a.jsonl", 11)]
    assert counts.documents == 2
    assert dict(counts.skipped) == {
        "empty": 1,
        "whitespace_only": 1,
        "not_json": 2,
        "no_text": 3,
        "invalid_utf8": 1,
        "blank_line": 1,
    }
    assert counts.places["no_text"] == ["train/a.jsonl:5", "train/a.jsonl:6", "train/a.jsonl:7"]
    assert counts.places["invalid_utf8"] == ["train/a.jsonl:8"]


def test_only_the_first_places_are_kept(train: Path) -> None:
    (train / "a.jsonl").write_bytes(b"x\n" * 100 + line("t"))
    _, counts = read(train.parent)
    assert counts.skipped["not_json"] == 100
    assert counts.places["not_json"] == [f"train/a.jsonl:{number}" for number in range(1, 6)]


def test_unusual_characters_pass_unchanged(train: Path) -> None:
    texts = [
        "a\0b",
        "\ufeffmark",
        "one\u2028two\u2029three\x85",
        "cr\r\nlf\r",
        "👩\u200d👩\u200d👧",
        "\u200fשלום",
        "x" * 1_000_000,
    ]
    escaped = b"".join(line(text) for text in texts)
    raw = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)
    (train / "a.jsonl").write_bytes(escaped + raw)
    documents, counts = read(train.parent)
    assert [text for text, _, _ in documents] == texts * 2
    assert not counts.skipped
    assert not counts.normalised


def test_changed_characters_are_counted(train: Path) -> None:
    (train / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line("one") + b'{"text": "a\\ud800b\\udfffc \\ud83d\\ude00"}\r\n')
    documents, counts = read(train.parent)
    assert [text for text, _, _ in documents] == ["one", "a\ufffdb\ufffdc 😀"]
    assert dict(counts.normalised) == {"byte_order_mark_removed": 1, "lone_surrogate_replaced": 2}


def test_sources(train: Path) -> None:
    lines = [
        line("a", "RedPajamaC4"),
        line("b", None),
        line("c", 3),
        b'{"text": "d"}\n',
        b'{"text": "e", "meta": "?"}\n',
    ]
    (train / "a.jsonl").write_bytes(b"".join(lines))
    (file,) = list_files(str(train.parent), "train")
    assert [document.source for document in read_documents(file, Counts())] == ["RedPajamaC4"] + ["unknown"] * 4


def test_forms_and_order(train: Path) -> None:
    (train / "deep").mkdir()
    (train / "b.jsonl.gz").write_bytes(gzip.compress(line("b1") + line("b2")))
    compressor = zstandard.ZstdCompressor()
    (train / "deep/c.jsonl.zst").write_bytes(compressor.compress(line("c1")) + compressor.compress(line("c2")))
    (train / "a.jsonl").write_bytes(line("a1") + line("a2").rstrip())
    (train / "ignored.txt").write_bytes(line("ignored"))
    documents, _ = read(train.parent)
    assert [text for text, _, _ in documents] == ["a1", "a2", "b1", "b2", "c1", "c2"]


@pytest.mark.parametrize("window_log", [27, 28, 31])
def test_a_long_window_is_no_damage(train: Path, window_log: int) -> None:
    """As `zstd --long` writes it; the chains and hashes are kept small, for they alone take memory here."""
    settings = zstandard.ZstdCompressionParameters(window_log=window_log, chain_log=10, hash_log=10)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    (train / "a.jsonl.zst").write_bytes(compressor.compress(line("one") + line("two")) + compressor.flush())
    documents, counts = read(train.parent)
    assert [text for text, _, _ in documents] == ["one", "two"]
    assert not counts.truncated


@pytest.mark.parametrize("suffix", ["zst", "gz"])
@pytest.mark.parametrize("kept", [0.4, 0.7, 0.999])
def test_a_truncated_file_gives_what_it_holds_and_is_named(train: Path, suffix: str, kept: float) -> None:
    texts = [f"{number} " + "abcdefghij"[number % 10] * number for number in range(3000)]
    data = b"".join(line(text) for text in texts)
    packed = zstandard.ZstdCompressor().compress(data) if suffix == "zst" else gzip.compress(data)
    (train / f"a.jsonl.{suffix}").write_bytes(packed[: int(len(packed) * kept)])
    documents, counts = read(train.parent)
    assert [text for text, _, _ in documents] == texts[: len(documents)]
    assert len(documents) < len(texts) or kept == 0.999
    size = int(len(packed) * kept)
    assert counts.truncated == {f"train/a.jsonl.{suffix}": (size, size)}
    assert not counts.skipped
    check_truncated(counts.truncated, allowed=True)
    with pytest.raises(DataError, match=rf"1 files end early .*\.{suffix} \(read {size:,} of {size:,} bytes"):
        check_truncated(counts.truncated, allowed=False)


def test_an_empty_file_is_sound_only_where_it_is_not_compressed(train: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        (train / name).write_bytes(b"")
    (train / "d.jsonl.gz").write_bytes(gzip.compress(b""))
    (train / "e.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(b""))
    documents, counts = read(train.parent)
    assert documents == []
    assert counts.truncated == {"train/b.jsonl.gz": (0, 0), "train/c.jsonl.zst": (0, 0)}


def test_damaged_compression_is_named_not_raised(train: Path) -> None:
    (train / "a.jsonl.zst").write_bytes(b"this is no zstandard frame")
    (train / "b.jsonl.gz").write_bytes(b"this is no gzip file")
    documents, counts = read(train.parent)
    assert documents == []
    assert counts.truncated == {"train/a.jsonl.zst": (26, 26), "train/b.jsonl.gz": (2, 20)}


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No folder .*/nowhere/train"):
        list_files(str(tmp_path / "nowhere"), "train")
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"No \.jsonl"):
        list_files(str(tmp_path), "train")


def test_links_are_what_they_name(train: Path) -> None:
    elsewhere = train.parent / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "b.jsonl").write_bytes(line("b"))
    (elsewhere / "deep/c.jsonl").write_bytes(line("c") * 2)
    (train / "a.jsonl").symlink_to(elsewhere / "b.jsonl")
    for name in ("one", "two"):
        (train / name).symlink_to(elsewhere)
    os.utime(elsewhere / "b.jsonl", (1000, 1000))
    names = ["a.jsonl", "one/b.jsonl", "one/deep/c.jsonl", "two/b.jsonl", "two/deep/c.jsonl"]
    size = len(line("b"))
    files = list_files(f"{train.parent.parent}//{train.parent.name}", "train")
    assert [(file.name, file.bytes) for file in files] == [
        (f"train/{name}", size * (2 if "c" in name else 1)) for name in names
    ]
    assert files[0].modified == files[1].modified == "1000.0"
    documents, _ = read(train.parent)
    assert [text for text, _, _ in documents] == ["b", "b", "c", "c", "b", "c", "c"]


@pytest.mark.parametrize(
    "links",
    [{"link": "."}, {"link": ".."}, {"deep/link": "../../train"}, {"deep/one": "../wide", "wide/two": "../deep"}],
)
def test_links_in_a_circle_are_refused(train: Path, links: dict[str, str]) -> None:
    (train / "a.jsonl").write_bytes(line("a"))
    for name in ("deep", "wide"):
        (train / name).mkdir()
    for name, target in links.items():
        (train / name).symlink_to(target)
    with pytest.raises(DataError, match=r"train/.* is a link to a folder that it lies in: remove the link"):
        list_files(str(train.parent), "train")


def test_a_folder_that_is_not_there_is_no_empty_one(train: Path) -> None:
    (train / "a.jsonl").write_bytes(line("a"))
    (train / "more").symlink_to("/nowhere/more")
    with pytest.raises(DataError, match=r"Cannot read .*train/more: No such file or directory; check the path"):
        list_files(str(train.parent), "train")


def check(counts: Counts, max_skipped_fraction: float) -> None:
    check_skipped(counts.documents, counts.skipped, counts.places, max_skipped_fraction, "here")


def test_allowed_share_of_skipped_records(train: Path) -> None:
    (train / "a.jsonl").write_bytes(line("one") * 9 + b"broken\n")
    _, counts = read(train.parent)
    check(counts, 0.1)
    with pytest.raises(DataError, match=r"1 of 10 records in here .* not_json 1 \(first at train/a.jsonl:10\)"):
        check(counts, 0.09)
    with pytest.raises(DataError, match="0 of 0 records"):
        check(Counts(), 1.0)


def test_reading_through_a_url(train: Path) -> None:
    (train / "a.jsonl").write_bytes(line("one"))
    (file,) = list_files(f"file://{train.parent}", "train")
    assert [document.text for document in read_documents(file, Counts())] == ["one"]
