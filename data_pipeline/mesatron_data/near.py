"""Texts that are nearly the same, in a sample of the training documents (`mesatron data duplicates`).

MinHash (Broder 1997) over runs of five words, with datasketch's index of bands: a look at how much of a corpus repeats
itself, by source and with places, not a step of preparation.
"""

from dataclasses import dataclass, field
from typing import Any

import xxhash

from mesatron_data.draw import draw_documents
from mesatron_data.errors import DataError
from mesatron_data.progress import Report

WORDS = 5
PERMUTATIONS = 128
PAIRS_KEPT = 20


@dataclass
class NearDuplicates:
    """Documents looked at by source, how many of them are nearly the same as an earlier one, and the first such pairs:
    place, place of the earlier one, estimated share of runs of words that they have in common."""

    documents: dict[str, int] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)
    pairs: list[tuple[str, str, float]] = field(default_factory=list)


def find_near_duplicates(
    input_folder: str, documents: int = 10_000, threshold: float = 0.8, workers: int = 1, progress: Report | None = None
) -> NearDuplicates:
    """Compare `documents` documents of `input_folder`/train (local path or URL) with each other.

    The same files give the same documents, which `workers` processes look for. A document counts when the estimated
    Jaccard similarity of its runs of words with an earlier one's is `threshold` or more. Takes about 5 kB of memory a
    document besides its text. Raises DataError where datasketch is not installed or records cannot be read.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise DataError("Near duplicates need the package datasketch: run `pip install datasketch`.") from error
    index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
    known: dict[str, Any] = {}
    result = NearDuplicates()
    for document in draw_documents(input_folder, {None: documents}, _one, "", workers, progress).documents:
        place, source = f"{document.file}:{document.line}", document.source
        own = MinHash(num_perm=PERMUTATIONS, hashfunc=xxhash.xxh32_intdigest)
        own.update_batch(_runs(document.text))
        result.documents[source] = result.documents.get(source, 0) + 1
        likeness = {other: own.jaccard(known[other]) for other in index.query(own)}
        nearest = max(likeness, key=lambda other: (likeness[other], other), default=None)
        if nearest is not None and likeness[nearest] >= threshold:
            result.repeated[source] = result.repeated.get(source, 0) + 1
            if len(result.pairs) < PAIRS_KEPT:
                result.pairs.append((place, nearest, likeness[nearest]))
        index.insert(place, own)
        known[place] = own
    return result


def _one(text: str) -> int:
    return 1


def _runs(text: str) -> list[bytes]:
    """Every run of WORDS words, or all words where there are fewer."""
    words = text.split()
    return [" ".join(words[begin : begin + WORDS]).encode() for begin in range(max(len(words) - WORDS + 1, 1))]
