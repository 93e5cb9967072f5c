"""Which documents of the token files go into shards, and reading them.

Documents are chosen by length, by whether their text has come before, and by source. Those of a stream (all that are
chosen, or those of one source) count as laid end to end, so any run of its tokens can be read by itself.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mesatron_data.manifest import SourceCounts, SplitCounts, length_class, sorted_counts
from mesatron_data.pack import Documents
from mesatron_data.tokens import Tables, read_tables, read_tokens


@dataclass(frozen=True)
class Cleaning:
    """Documents to leave out: shorter or longer than so many tokens, BOS counted (0: no such bound), and with
    `remove_duplicates` those whose text has come before."""

    min_document_tokens: int = 0
    max_document_tokens: int = 0
    remove_duplicates: bool = False


@dataclass(frozen=True)
class ChosenFile:
    """A token file and what is wanted of it.

    sources         names that its source numbers stand for
    repeated        the file that `mesatron_data.duplicates.find_duplicates` wrote, in which this file's documents begin
                    at `first_document`
    """

    path: Path
    tokens: int
    documents: int
    token_dtype: str
    sources: tuple[str, ...]
    repeated: Path
    first_document: int
    cleaning: Cleaning = field(default_factory=Cleaning)


@dataclass(frozen=True)
class Segment:
    """Tokens `begin` to `end` of the chosen documents of a file, or of those from one source; with `whole`, instead the
    documents that begin there. `numbers` are what the file's own source numbers stand for in the shards."""

    file: ChosenFile
    source: str | None
    begin: int
    end: int
    whole: bool
    numbers: tuple[int, ...]


def survey(file: ChosenFile) -> SplitCounts:
    """Return what is chosen of a token file, by source, and what is left out."""
    tables, repeated, reasons = _judge(file)
    result = SplitCounts(duplicates=int(repeated.sum()))
    chosen = np.ones(file.documents, bool)
    for reason, mask in reasons.items():  # a document counts for its first reason
        if (chosen & mask).any():
            result.removed[reason] = int((chosen & mask).sum())
        chosen &= ~mask
    for number, source in enumerate(file.sources):
        own = chosen & (tables.sources == number)
        if own.any():
            result.sources[source] = SourceCounts(
                documents=int(own.sum()), tokens=int(tables.lengths[own].sum()), bytes=int(tables.bytes[own].sum())
            )
    lengths, counts = np.unique(tables.lengths[chosen], return_counts=True)
    classes: Counter[int] = Counter()
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        classes[length_class(length)] += count
    result.document_lengths = sorted_counts(classes)
    return result


def read_chosen(segments: list[Segment]) -> Documents:
    """Return the documents of segments laid end to end."""
    tokens, begins, sources, position = [], [], [], 0
    for segment in segments:
        file = segment.file
        tables, _, reasons = _judge(file)
        chosen = np.ones(file.documents, bool)
        if segment.source is not None:
            chosen &= tables.sources == file.sources.index(segment.source)
        for mask in reasons.values():
            chosen &= ~mask
        numbers = np.flatnonzero(chosen)
        ends = tables.lengths[numbers].cumsum()
        begin = ends - tables.lengths[numbers]
        low = int(
            np.searchsorted(begin if segment.whole else ends, segment.begin, "left" if segment.whole else "right")
        )
        high = int(np.searchsorted(begin, segment.end))
        if low == high:
            continue
        first, last = numbers[low], numbers[high - 1]
        run = read_tokens(
            file.path, file.token_dtype, int(tables.begins[first]), int(tables.begins[last] + tables.lengths[last])
        )
        run = run[np.repeat(chosen[first : last + 1], tables.lengths[first : last + 1])]
        start = int(begin[low])
        if not segment.whole:
            run = run[segment.begin - start : segment.end - start]
            start = segment.begin
        tokens.append(run)
        begins.append(begin[low:high] - start + position)
        sources.append(np.array(segment.numbers, np.uint16)[tables.sources[numbers[low:high]]])
        position += len(run)
    if not tokens:
        return Documents(np.empty(0, np.uint32), np.empty(0, np.int64), np.empty(0, np.uint16))
    return Documents(np.concatenate(tokens), np.concatenate(begins), np.concatenate(sources))


def _judge(file: ChosenFile) -> tuple[Tables, NDArray[np.bool_], dict[str, NDArray[np.bool_]]]:
    """A file's tables, which of its documents have come before, and which are left out for each reason."""
    tables = read_tables(file.path, file.tokens, file.documents, file.token_dtype)
    repeated = np.fromfile(file.repeated, np.uint8, file.documents, offset=file.first_document).astype(bool)
    reasons = {}
    cleaning = file.cleaning
    if cleaning.min_document_tokens:
        reasons["too_short"] = tables.lengths < cleaning.min_document_tokens
    if cleaning.max_document_tokens:
        reasons["too_long"] = tables.lengths > cleaning.max_document_tokens
    if cleaning.remove_duplicates:
        reasons["duplicate"] = repeated
    return tables, repeated, reasons
