"""Facts about a prepared data folder for a person to look at (`mesatron data inspect`)."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mesatron_data.manifest import Manifest, load_manifest, sorted_counts
from mesatron_data.mds import read_samples
from mesatron_data.pack import Sample, padding
from mesatron_data.tokenizer import Tokenizer

MOST_SAMPLES, MOST_SHARDS = 10_000, 64


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one, in a sample: `begins` tells whether its BOS is here."""

    source: str
    begins: bool
    text: str


@dataclass(frozen=True)
class Inspection:
    """manifest: counts per split and source, document lengths, skipped records, what packing lost.

    The rest is of MOST_SAMPLES training samples at most, evenly spread over MOST_SHARDS shards at most, for those of a
    source may lie together:

    frequent_tokens  most frequent tokens: how written, share of all
    token_counts     how often each token that occurs does, falling
    unused_tokens    vocabulary entries that do not occur
    ignored_targets  share of targets that are BOS and so have no loss
    pieces           samples by the number of documents, or parts of them, that they hold
    samples          the first of them decoded, piece by piece
    """

    manifest: Manifest
    frequent_tokens: list[tuple[str, float]]
    token_counts: list[int]
    unused_tokens: int
    ignored_targets: float
    pieces: dict[int, int]
    samples: list[list[Piece]]


def inspect(folder: str | Path, samples: int = 3, tokens: int = 20) -> Inspection:
    """Read the manifest, count tokens and decode `samples` of the training samples. Raises DataError for a damaged
    folder."""
    manifest = load_manifest(str(folder))
    tokenizer = Tokenizer.of_prepared(str(folder))
    counts = np.zeros(manifest.vocabulary_size, np.int64)
    shown: list[list[Piece]] = []
    pieces: Counter[int] = Counter()
    for sample in read_samples(folder, "train", MOST_SAMPLES, MOST_SHARDS):
        counts += np.bincount(sample.tokens[1:], minlength=manifest.vocabulary_size)
        pieces[len(sample.document_starts)] += 1
        if len(shown) < samples:
            shown.append(_pieces(sample, manifest, tokenizer))
    total = int(counts.sum())
    frequent = Counter(dict(enumerate(counts.tolist()))).most_common(tokens)
    return Inspection(
        manifest=manifest,
        frequent_tokens=[(tokenizer.piece(token), count / total) for token, count in frequent],
        token_counts=sorted(counts[counts > 0].tolist(), reverse=True),
        unused_tokens=int((counts == 0).sum()),
        ignored_targets=int(counts[manifest.bos_id]) / total,
        pieces=sorted_counts(pieces),
        samples=shown,
    )


def _pieces(sample: Sample, manifest: Manifest, tokenizer: Tokenizer) -> list[Piece]:
    end_of_text = len(sample.tokens)
    if manifest.packing == "best_fit":
        end_of_text -= padding(sample, manifest.bos_id)
    bounds = [*(start for start in sample.document_starts.tolist() if start < end_of_text), end_of_text]
    return [
        Piece(
            source=manifest.sources[source],
            begins=int(sample.tokens[begin]) == manifest.bos_id,
            text=tokenizer.decode(sample.tokens[begin:end].tolist()),
        )
        for source, begin, end in zip(sample.sources.tolist(), bounds[:-1], bounds[1:], strict=False)
    ]
