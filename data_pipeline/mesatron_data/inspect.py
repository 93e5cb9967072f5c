"""Facts about a prepared data folder for a person to look at (`mesatron data inspect`)."""

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from mesatron_data.manifest import Manifest, load_manifest, read_file
from mesatron_data.mds import read_samples
from mesatron_data.pack import Sample
from mesatron_data.tokenizer import MODEL_FILE, Tokenizer

TOKENS_SAMPLES = 10_000


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one, in a sample: `begins` tells whether its BOS is here."""

    source: str
    begins: bool
    text: str


@dataclass(frozen=True)
class Inspection:
    """manifest: counts per split and source, document lengths, skipped records, dropped tail tokens.

    frequent_tokens  most frequent tokens of the first TOKENS_SAMPLES training samples: how written, share of all
    unused_tokens    vocabulary entries that do not occur there
    ignored_targets  share of targets there that are BOS and so have no loss
    samples          decoded training samples, piece by piece
    """

    manifest: Manifest
    frequent_tokens: list[tuple[str, float]]
    unused_tokens: int
    ignored_targets: float
    samples: list[list[Piece]]


def inspect(folder: str | Path, samples: int = 3, tokens: int = 20) -> Inspection:
    """Read the manifest, count tokens and decode the first `samples` training samples. Raises DataError for a damaged
    folder."""
    manifest = load_manifest(str(folder))
    tokenizer = Tokenizer(read_file(str(folder), MODEL_FILE), Path(folder) / MODEL_FILE)
    counts = np.zeros(manifest.vocabulary_size, np.int64)
    shown: list[list[Piece]] = []
    for sample in islice(read_samples(folder, "train"), TOKENS_SAMPLES):
        counts += np.bincount(sample.tokens[1:], minlength=manifest.vocabulary_size)
        if len(shown) < samples:
            shown.append(_pieces(sample, manifest, tokenizer))
    total = int(counts.sum())
    frequent = Counter(dict(enumerate(counts.tolist()))).most_common(tokens)
    return Inspection(
        manifest=manifest,
        frequent_tokens=[(tokenizer.piece(token), count / total) for token, count in frequent],
        unused_tokens=int((counts == 0).sum()),
        ignored_targets=int(counts[manifest.bos_id]) / total,
        samples=shown,
    )


def _pieces(sample: Sample, manifest: Manifest, tokenizer: Tokenizer) -> list[Piece]:
    bounds = [*sample.document_starts.tolist(), len(sample.tokens)]
    return [
        Piece(
            source=manifest.sources[source],
            begins=int(sample.tokens[begin]) == manifest.bos_id,
            text=tokenizer.decode(sample.tokens[begin:end].tolist()),
        )
        for source, begin, end in zip(sample.sources.tolist(), bounds[:-1], bounds[1:], strict=True)
    ]
