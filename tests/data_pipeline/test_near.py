"""Near duplicates in documents that were changed by a known number of words, against exact shares of common runs."""

import json
from pathlib import Path

import numpy as np
import pytest
from mesatron_data.near import WORDS, find_near_duplicates


def jaccard(one: list[str], other: list[str]) -> float:
    runs = [{tuple(words[begin : begin + WORDS]) for begin in range(len(words) - WORDS + 1)} for words in (one, other)]
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


@pytest.fixture(scope="module")
def documents() -> list[list[str]]:
    """Of each four, the second is a copy with one word changed, the third with many, the fourth is another."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(15):
        first = [f"w{number}" for number in draw.integers(0, 5000, 200)]
        slightly, much = list(first), list(first)
        slightly[100] = "changed"
        for place in range(0, 200, 6):
            much[place] = "changed"
        made += [first, slightly, much, [f"w{number}" for number in draw.integers(0, 5000, 200)]]
    return made


def write(folder: Path, documents: list[list[str]]) -> None:
    (folder / "train").mkdir()
    (folder / "train/a.jsonl").write_text(
        "".join(
            json.dumps({"text": " ".join(words), "meta": {"redpajama_set_name": f"source{number % 2}"}}) + "\n"
            for number, words in enumerate(documents)
        )
    )


def test_what_is_nearly_the_same_is_found_with_its_place(documents: list[list[str]], tmp_path: Path) -> None:
    write(tmp_path, documents)
    found = find_near_duplicates(str(tmp_path), threshold=0.8)
    assert found.documents == {"source0": 30, "source1": 30}
    assert found.repeated == {"source1": 15}, "the slightly changed copies alone"
    for number, (place, earlier, likeness) in enumerate(found.pairs):
        assert (place, earlier) == (f"train/a.jsonl:{4 * number + 2}", f"train/a.jsonl:{4 * number + 1}")
        assert likeness == pytest.approx(jaccard(documents[4 * number], documents[4 * number + 1]), abs=0.1)


def test_a_sample_is_a_function_of_the_files(documents: list[list[str]], tmp_path: Path) -> None:
    write(tmp_path, documents)
    found = find_near_duplicates(str(tmp_path), documents=20)
    assert sum(found.documents.values()) == 20
    assert find_near_duplicates(str(tmp_path), documents=20) == found


def test_short_documents_are_compared_whole(tmp_path: Path) -> None:
    write(tmp_path, [["same"], ["other", "words"], ["same"]])
    assert find_near_duplicates(str(tmp_path)).pairs == [("train/a.jsonl:3", "train/a.jsonl:1", 1.0)]
