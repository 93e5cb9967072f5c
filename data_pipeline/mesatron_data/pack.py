"""Pack documents into samples of equal length (MesaNet paper, appendix G: documents one after another, separated by
BOS).

The token stream is BOS document BOS document ... A sample holds context_length + 1 tokens and samples start every
context_length tokens: the last token of a sample is only ever predicted, and is the first input of the next sample.
So each token of the stream is a target exactly once (but for the first token, a BOS), and nothing is repeated or
padded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """One packed sample.

    tokens          [context_length + 1], the packer's token dtype
    document_starts [pieces] int32, rising positions in `tokens`; the first is 0 whether or not a document begins there
    sources         [pieces] uint16, the source of the document (or rest of one) that begins at each start
    """

    tokens: NDArray[np.unsignedinteger]
    document_starts: NDArray[np.int32]
    sources: NDArray[np.uint16]


class Packer:
    """Cut a stream of documents into samples.

    Attribute `tail_tokens`: tokens at the end of the stream so far that no sample holds.
    """

    def __init__(self, context_length: int, bos_id: int, token_dtype: str) -> None:
        self._context_length = context_length
        self._bos_id = bos_id
        self._dtype = np.dtype(token_dtype)
        self._tokens: NDArray[np.unsignedinteger] = np.empty(0, self._dtype)
        self._starts: list[int] = []
        self._sources: list[int] = []
        self._overlap = 0

    def add(self, ids: list[int], source: int) -> Iterator[Sample]:
        """Append BOS and the ids of one document and yield the samples that are now complete; `source` is a number
        below 65536."""
        self._starts.append(len(self._tokens))
        self._sources.append(source)
        self._tokens = np.concatenate([self._tokens, np.array([self._bos_id, *ids], self._dtype)])
        length = self._context_length
        while len(self._tokens) > length:
            held = sum(start <= length for start in self._starts)
            yield Sample(
                self._tokens[: length + 1],
                np.array(self._starts[:held], np.int32),
                np.array(self._sources[:held], np.uint16),
            )
            # The piece that reaches the last token goes on in the next sample, where it starts at 0.
            self._starts = [0, *(start - length for start in self._starts[held:])]
            self._sources = self._sources[held - 1 :]
            self._tokens = self._tokens[length:]
            self._overlap = 1

    @property
    def tail_tokens(self) -> int:
        return len(self._tokens) - self._overlap
