"""Random access to the samples of a prepared split, local or remote, with every byte checked against its hash before
use.

Shards are read by MosaicML streaming's own MDS reader. Its `StreamingDataset` is not used: its iteration repeats
samples to fill up an epoch and ends quietly or hangs on a damaged shard, its segments of shared memory outlive a killed
process, and its cache limit counts each split of each run by itself.
"""

from bisect import bisect_right
from pathlib import Path

import numpy as np

from mesatron_data.cache import ShardCache
from mesatron_data.errors import DataError
from mesatron_data.manifest import UNPACKED_FOLDER, load_manifest
from mesatron_data.mds import shard_files
from mesatron_data.pack import Sample
from mesatron_data.store import is_remote, normal


class SampleReader:
    """One split of a prepared folder; any number of processes may have it open, with the same cache folder or not.

    folder             local path or URL
    cache_folder       where unpacked shards are kept, needed for a URL; without it, `unpacked` in the data folder
    cache_limit_bytes  that `cache_folder` may take; 0 for no limit

    Attributes: manifest, samples (how many), samples_per_shard and bytes_per_shard (unpacked) [shards] int64, cache.
    Raises DataError when the folder is no prepared folder, its parts do not fit together or a shard is larger than the
    limit.
    """

    def __init__(self, folder: str, split: str, cache_folder: Path | None = None, cache_limit_bytes: int = 0) -> None:
        folder = normal(folder)
        if cache_folder is None and (is_remote(folder) or cache_limit_bytes):
            what = f"{folder} is remote" if is_remote(folder) else "data.cache_limit_bytes is set"
            raise DataError(f"{what}: name a cache folder on this machine for its shards (data.cache_folder).")
        self.manifest = load_manifest(folder)
        shards = shard_files(folder, self.manifest)[split]
        self.samples_per_shard = np.array([shard["samples"] for shard in shards], np.int64)
        self.bytes_per_shard = np.array([shard["raw_data"]["bytes"] for shard in shards], np.int64)
        self.samples = int(self.samples_per_shard.sum())
        self._begins = [0, *self.samples_per_shard.cumsum().tolist()[:-1]]
        root, name = cache_folder or Path(folder, UNPACKED_FOLDER), f"{self.manifest.unpacked_name}/{split}"
        self.cache = ShardCache(f"{folder}/{split}", shards, root, name, cache_limit_bytes)

    def read(self, sample_id: int) -> Sample:
        """Return one sample, fetching its shard if need be. Safe in threads. Raises DataError when the shard is
        missing or damaged."""
        shard = bisect_right(self._begins, sample_id) - 1
        return Sample(**self.cache.read(shard, sample_id - self._begins[shard]))
