"""Random samples of the training documents, drawn in any number of processes.

The documents whose places have the smallest hashes are taken, so that the same files give the same sample. Of a file
only those are kept that may still be among them, which gets fewer with every file that was read.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from mesatron_data.progress import Progress, Report
from mesatron_data.records import Counts, Document, InputFile, list_files, read_documents
from mesatron_data.workers import open_workers

Limits = Mapping[str | None, float]
"""How much of each source is taken; of None, of all that are not named. Nothing is taken of others."""
Size = Callable[[str], int]
"""How much a text counts for."""
NO_BOUND = 1 << 64


@dataclass
class Drawn:
    """documents: of the sample, in input order; found: bytes of text that each source has; counts: of all records."""

    documents: list[Document] = field(default_factory=list)
    found: dict[str, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)


class _Smallest:
    """Of the documents that were added those with the smallest keys, as many as `limit` has room for, and at least one;
    all of them are below `bound`."""

    def __init__(self, limit: float, bound: int = NO_BOUND) -> None:
        self._limit, self._total = limit, 0
        self.bound = bound
        self._heap: list[tuple[int, str, int, int, Document]] = []

    def add(self, key: int, size: int, document: Document) -> None:
        if key >= self.bound:
            return
        heapq.heappush(self._heap, (-key, document.file, document.line, size, document))
        self._total += size
        while self._total > self._limit and len(self._heap) > 1:
            negative, _, _, dropped, _ = heapq.heappop(self._heap)
            self._total -= dropped
            self.bound = -negative

    def __iter__(self) -> Iterator[tuple[int, int, Document]]:
        return ((-negative, size, document) for negative, _, _, size, document in self._heap)


@dataclass(frozen=True)
class _Job:
    """A file, and what is known of the sample when it is begun."""

    file: InputFile
    seed: str
    size: Size
    limits: Limits
    bounds: dict[str | None, int]


@dataclass
class _Part:
    """What a file adds: kept has key, size and document by limit."""

    kept: dict[str | None, list[tuple[int, int, Document]]]
    found: dict[str, int]
    counts: Counts


def draw_documents(
    input_folder: str, limits: Limits, size: Size, seed: str = "", workers: int = 1, progress: Report | None = None
) -> Drawn:
    """Draw a sample of `input_folder`/train (local path or URL), at most `limits`, where a text counts for `size`.

    One document is taken of each limit at least. size: a function of a module, for it is called in `workers` processes.
    Raises DataError when records cannot be read.
    """
    files = list_files(input_folder, "train")
    kept = {name: _Smallest(limit) for name, limit in limits.items()}
    jobs = (_Job(file, seed, size, limits, {name: smallest.bound for name, smallest in kept.items()}) for file in files)
    parts: dict[int, _Part] = {}
    total, done, documents = sum(file.bytes for file in files), 0, 0
    with open_workers(workers, __name__) as pool:
        for number, part in pool.as_completed(_read, jobs):
            for name, entries in part.kept.items():
                for entry in entries:
                    kept[name].add(*entry)
            part.kept.clear()
            parts[number] = part
            done, documents = done + files[number].bytes, documents + part.counts.documents
            if progress is not None:
                progress(Progress("read", done, total, documents))
    drawn = Drawn()
    for number in range(len(files)):
        drawn.counts.add(parts[number].counts)
        for source, found in parts[number].found.items():
            drawn.found[source] = drawn.found.get(source, 0) + found
    order = {file.name: number for number, file in enumerate(files)}
    drawn.documents = [document for smallest in kept.values() for _, _, document in smallest]
    drawn.documents.sort(key=lambda document: (order[document.file], document.line))
    return drawn


def _read(job: _Job) -> _Part:
    kept = {name: _Smallest(limit, job.bounds[name]) for name, limit in job.limits.items()}
    found: dict[str, int] = {}
    counts = Counts()
    for document in read_documents(job.file, counts):
        found[document.source] = found.get(document.source, 0) + len(document.text.encode())
        smallest = kept.get(document.source) or kept.get(None)
        if smallest is not None:
            key = xxhash.xxh3_64_intdigest(f"{job.seed}{document.file}:{document.line}".encode())
            smallest.add(key, job.size(document.text), document)
    return _Part({name: list(smallest) for name, smallest in kept.items()}, found, counts)
