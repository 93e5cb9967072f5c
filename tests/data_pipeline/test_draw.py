"""Samples against the rule itself, applied to all documents at once."""

import json
import random
from pathlib import Path

import pytest
import xxhash
from mesatron_data.draw import Limits, draw_documents
from mesatron_data.progress import Progress
from mesatron_data.records import Counts, list_files, read_documents

FILES, DOCUMENTS = 12, 25


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of three sources, with two lines that are no records in each."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    (folder / "train").mkdir()
    for number in range(FILES):
        records = [
            {"text": draw.randrange(1, 200) * "é", "meta": {"redpajama_set_name": draw.choice("ABC")}}
            for _ in range(DOCUMENTS)
        ]
        lines = ["", *map(json.dumps, records), "no JSON"]
        (folder / f"train/{number:02}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "limits", [{None: 4000}, {None: 10**9}, {None: 1}, {"A": 2000, "C": 700}, {"B": 3000, None: 1000}], ids=str
)
def test_the_smallest_hashes_that_fit_are_taken(texts: Path, limits: Limits, workers: int) -> None:
    counts, seen = Counts(), list[Progress]()
    every = [document for file in list_files(str(texts), "train") for document in read_documents(file, counts)]
    expected = []
    for name, limit in limits.items():
        own = [document for document in every if (document.source if document.source in limits else None) == name]
        own.sort(key=lambda document: xxhash.xxh3_64_intdigest(f"7 {document.file}:{document.line}".encode()))
        total = 0
        for number, document in enumerate(own):
            total += len(document.text)
            if total > limit and number > 0:
                break
            expected.append(document)
    drawn = draw_documents(str(texts), limits, len, "7 ", workers, seen.append)
    assert drawn.documents == sorted(expected, key=every.index)
    assert drawn.counts == counts
    assert counts.places["not_json"][0] == "train/00.jsonl:27"
    assert drawn.found == {
        source: sum(2 * len(document.text) for document in every if document.source == source) for source in "ABC"
    }
    size = sum(path.stat().st_size for path in texts.rglob("*.jsonl"))
    assert seen[-1] == Progress("read", size, size, FILES * DOCUMENTS)


def test_another_seed_draws_others(texts: Path) -> None:
    one, other = (draw_documents(str(texts), {None: 4000}, len, seed).documents for seed in ("1", "2"))
    assert one != other
