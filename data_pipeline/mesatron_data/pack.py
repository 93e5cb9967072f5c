"""Pack documents into samples of equal length.

A sample holds context_length + 1 tokens: its first context_length are inputs, its last context_length are targets.

`concatenate` is the paper's way (MesaNet, appendix G): documents one after another, each begun by BOS, cut where a
sample is full. Samples start every context_length tokens, so the last token of a sample, only ever predicted there, is
the first input of the next. Each token of the stream is a target exactly once (but for the first, a BOS), nothing is
repeated or padded, and where a sample lies follows from its number alone.

`best_fit` cuts no document that fits into a sample: longer ones are cut into pieces of context_length tokens, each
begun by a BOS of its own, and then every piece goes where it leaves the least room, longest pieces first (Ding et al.
2024, arXiv 2404.10830). What stays empty is filled with BOS, which as a target has no loss.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """One packed sample.

    tokens          [context_length + 1], the stream's token dtype
    document_starts [pieces] int32, rising positions in `tokens`; the first is 0 whether or not a document begins there
    sources         [pieces] uint16, the source of the document (or rest of one) that begins at each start; padding
                    begins at a start of its own and has the last document's source
    """

    tokens: NDArray[np.unsignedinteger]
    document_starts: NDArray[np.int32]
    sources: NDArray[np.uint16]


@dataclass(frozen=True)
class Documents:
    """Documents laid end to end.

    tokens   [n], each document begun by BOS; at its ends maybe only a part of one
    begins   [documents] rising positions in `tokens` at which documents begin; the first, 0 or less, is that of the
             document that `tokens` begins with or goes on with
    sources  [documents]
    """

    tokens: NDArray[np.unsignedinteger]
    begins: NDArray[np.int64]
    sources: NDArray[np.uint16]


def sample_count(tokens: int, context_length: int) -> tuple[int, int]:
    """Return how many samples a stream of `tokens` tokens gives, and how many tokens at its end no sample holds."""
    samples = max(tokens - 1, 0) // context_length
    return samples, tokens - (samples * context_length + 1) if samples else tokens


def cut(documents: Documents, context_length: int) -> Iterator[Sample]:
    """Cut a run of the stream into the samples it holds; tokens beyond the last whole sample are left out."""
    tokens, begins = documents.tokens, documents.begins
    samples, _ = sample_count(len(tokens), context_length)
    sample_begins = np.arange(samples) * context_length
    first = np.searchsorted(begins, sample_begins, side="right") - 1
    end = np.searchsorted(begins, sample_begins + context_length, side="right")
    for position, low, high in zip(sample_begins.tolist(), first.tolist(), end.tolist(), strict=True):
        yield Sample(
            tokens=tokens[position : position + context_length + 1],
            document_starts=np.maximum(begins[low:high] - position, 0).astype(np.int32),
            sources=documents.sources[low:high],
        )


def pieces_of(documents: Documents, context_length: int) -> list[tuple[int, int, int]]:
    """Return where pieces of at most `context_length` tokens begin and end in whole documents, BOS left out, and their
    source, in input order."""
    pieces = []
    bounds = [*documents.begins.tolist(), len(documents.tokens)]
    for begin, end, source in zip(bounds[:-1], bounds[1:], documents.sources.tolist(), strict=True):
        for start in range(begin + 1, max(end, begin + 2), context_length):
            pieces.append((start, min(start + context_length, end), source))
    return pieces


def best_fit(
    documents: Documents, pieces: list[tuple[int, int, int]], context_length: int, bos_id: int
) -> Iterator[Sample]:
    """Pack the pieces of whole documents, in samples ordered by the first piece in each."""
    for members in _bins([1 + end - begin for begin, end, _ in pieces], context_length + 1):
        tokens = np.full(context_length + 1, bos_id, documents.tokens.dtype)
        starts, sources, filled = [], [], 0
        for begin, end, source in (pieces[number] for number in members):
            starts.append(filled)
            sources.append(source)
            tokens[filled + 1 : filled + 1 + end - begin] = documents.tokens[begin:end]
            filled += 1 + end - begin
        if filled <= context_length:
            starts.append(filled)
            sources.append(sources[-1])
        yield Sample(tokens, np.array(starts, np.int32), np.array(sources, np.uint16))


def padding(sample: Sample, bos_id: int) -> int:
    """Return how many tokens at the end of a `best_fit` sample hold no document."""
    last = int(sample.document_starts[-1])
    return len(sample.tokens) - last if last and (sample.tokens[last:] == bos_id).all() else 0


def _bins(lengths: list[int], capacity: int) -> list[list[int]]:
    """Numbers of the pieces of each bin: in rising order, bins by their first one."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room left and number of each bin that is not full, rising
    for piece in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[piece]
        place = bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, number = rooms.pop(place)
            bins[number].append(piece)
        else:
            room, number = capacity, len(bins)
            bins.append([piece])
        if room > length:
            insort(rooms, (room - length, number))
    return sorted(sorted(members) for members in bins)
