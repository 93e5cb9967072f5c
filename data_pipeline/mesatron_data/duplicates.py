"""Documents whose text has come before: found across any number of files in bounded memory, by 64-bit hashes on disk.

Hashes are dealt into partition files by their first bits; each partition is sorted by itself. Two different texts of
590 million (all of SlimPajama) share a hash with a probability of one percent.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PARTITIONS = 256
ENTRY = np.dtype([("hash", np.uint64), ("number", np.int64)])


def find_duplicates(hashes: Iterable[NDArray[np.uint64]], documents: int, folder: Path) -> Path:
    """Write folder/repeated, a byte for each of `documents` documents in the order of `hashes`: 1 where the same hash
    has come before, else 0. Takes 17 bytes of disk a document, and the memory of a 256th of that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partitions = [folder / f"hashes-{number:03}.partial" for number in range(PARTITIONS)]
    for partition in partitions:
        partition.write_bytes(b"")
    number = 0
    for some in hashes:
        entries = np.empty(len(some), ENTRY)
        entries["hash"], entries["number"] = some, np.arange(number, number + len(some))
        number += len(some)
        home = (some >> np.uint64(64 - (PARTITIONS - 1).bit_length())).astype(np.int64)
        order = np.argsort(home, kind="stable")
        ends = np.searchsorted(home[order], np.arange(PARTITIONS), side="right")
        for partition, mine in zip(partitions, np.split(entries[order], ends[:-1]), strict=True):
            if len(mine):
                with partition.open("ab") as file:
                    file.write(mine.tobytes())
    result = folder / "repeated"
    with result.open("wb") as file:
        if documents:  # all of its space at once: a full disk would be a SIGBUS to who writes through the map
            os.posix_fallocate(file.fileno(), 0, documents)
    repeated = np.memmap(result, np.uint8, "r+", shape=(documents,)) if documents else np.empty(0, np.uint8)
    for partition in partitions:
        entries = np.fromfile(partition, ENTRY)
        entries = entries[np.argsort(entries["hash"], kind="stable")]  # equal ones stay in the order of documents
        again = entries["hash"][1:] == entries["hash"][:-1]
        repeated[entries["number"][1:][again]] = 1
        partition.unlink()
    if isinstance(repeated, np.memmap):
        repeated.flush()
    return result
