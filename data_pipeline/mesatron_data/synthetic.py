"""Prepared shards without text or tokenizer, to try a training system on."""

from pathlib import Path

import numpy as np

from mesatron_data.files import sha256
from mesatron_data.manifest import Manifest, SourceCounts, SplitCounts, read_file, read_json
from mesatron_data.mds import COMPRESSION, HASHES, columns
from mesatron_data.mosaic import streaming
from mesatron_data.pack import Documents, cut


def write_shards(folder: Path, vocabulary_size: int, context_length: int, samples: dict[str, int], seed: int) -> Path:
    """Make `folder` a prepared one of random documents in which low ids are frequent; BOS is 1, the sources a and b.

    Documents are up to three sequences long, so that some sequences hold several and others none that begins. `samples`
    gives the number of sequences of each split. No tokenizer belongs to it.
    """
    draw = np.random.default_rng(seed)
    manifest = Manifest(
        tokenizer_sha256="e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",  # of the empty file
        vocabulary_size=vocabulary_size, bos_id=1, context_length=context_length, token_dtype="uint16",
        sources=["a", "b"], splits={}, request="",
    )  # fmt: skip
    folder.mkdir(parents=True)
    for split, count in samples.items():
        documents: list[np.ndarray] = []
        sources: list[int] = []
        begins = [0]
        while begins[-1] <= count * context_length:
            ids = 2 + (vocabulary_size - 2) * draw.random(int(draw.integers(1, 3 * context_length))) ** 3
            documents += [np.array([1]), ids.astype(int)]
            begins.append(begins[-1] + 1 + len(ids))
            sources.append(int(draw.integers(2)))
        tokens = np.concatenate(documents)[: count * context_length + 1].astype(np.uint16)
        with streaming.MDSWriter(
            columns=columns("uint16", context_length), out=str(folder / split), compression=COMPRESSION, hashes=HASHES,
            size_limit=1 << 13,
        ) as writer:  # fmt: skip
            for sample in cut(Documents(tokens, np.array(begins[:-1]), np.array(sources, np.uint16)), context_length):
                writer.write(vars(sample))
        manifest.splits[split] = SplitCounts(samples=count, sources={"a": SourceCounts(), "b": SourceCounts()})
    indexes = {split: read_json(str(folder), f"{split}/index.json") for split in samples}
    manifest.fingerprint = manifest.content_fingerprint(indexes)
    manifest.index_sha256 = {split: sha256(read_file(str(folder), f"{split}/index.json")) for split in samples}
    (folder / "tokenizer.model").touch()
    (folder / "manifest.json").write_bytes(manifest.to_json())
    return folder
