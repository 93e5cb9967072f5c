"""How far work on a corpus is."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a step is: `done` of `total` bytes of records (steps "read" and "tokenize") or shards (step "pack"), and
    the documents and, where they are known, tokens of what is done."""

    step: str
    done: int
    total: int
    documents: int
    tokens: int | None = None


Report = Callable[[Progress], None]
