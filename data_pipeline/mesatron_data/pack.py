"""Pack documents into samples of equal length (MesaNet paper, appendix G: documents one after another, separated by
BOS).

The token stream is BOS document BOS document ... A sample holds context_length + 1 tokens and samples start every
context_length tokens: the last token of a sample is only ever predicted, and is the first input of the next sample.
So each token of the stream is a target exactly once (but for the first token, a BOS), and nothing is repeated or
padded. Where a sample lies in the stream follows from its number alone, so any run of samples can be cut by itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """One packed sample.

    tokens          [context_length + 1], the stream's token dtype
    document_starts [pieces] int32, rising positions in `tokens`; the first is 0 whether or not a document begins there
    sources         [pieces] uint16, the source of the document (or rest of one) that begins at each start
    """

    tokens: NDArray[np.unsignedinteger]
    document_starts: NDArray[np.int32]
    sources: NDArray[np.uint16]


def sample_count(tokens: int, context_length: int) -> tuple[int, int]:
    """Return how many samples a stream of `tokens` tokens gives, and how many tokens at its end no sample holds."""
    samples = max(tokens - 1, 0) // context_length
    return samples, tokens - (samples * context_length + 1) if samples else tokens


def cut(
    tokens: NDArray[np.unsignedinteger],
    begins: NDArray[np.int64],
    sources: NDArray[np.uint16],
    context_length: int,
) -> Iterator[Sample]:
    """Cut a run of the stream into the samples it holds.

    tokens   any number; those beyond the last whole sample are left out
    begins   [documents] rising positions in `tokens` at which documents begin; the first, 0 or less, is that of the
             document that `tokens` begins with or goes on with
    sources  [documents]
    """
    samples, _ = sample_count(len(tokens), context_length)
    sample_begins = np.arange(samples) * context_length
    first = np.searchsorted(begins, sample_begins, side="right") - 1
    end = np.searchsorted(begins, sample_begins + context_length, side="right")
    for position, low, high in zip(sample_begins.tolist(), first.tolist(), end.tolist(), strict=True):
        yield Sample(
            tokens=tokens[position : position + context_length + 1],
            document_starts=np.maximum(begins[low:high] - position, 0).astype(np.int32),
            sources=sources[low:high],
        )
