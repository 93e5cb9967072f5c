"""The order of training samples, and the streams that training and validation read.

The order is a function of (seed, epoch, mixture) alone. The samples of global batch b of an epoch are
order[b * G : (b + 1) * G] for G = global_batch_size, of which rank r of w takes the r-th of w equal runs, so neither
the number of processes and readers nor interruptions change what a global batch holds. An epoch is samples // G global
batches; the rest is left out (other samples each epoch).
"""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mesatron_data.batch import Batch, collate
from mesatron_data.errors import DataError
from mesatron_data.mixture import mixed_order, shares_of
from mesatron_data.mosaic import streaming
from mesatron_data.prefetch import Prefetcher
from mesatron_data.reader import SampleReader


def epoch_order(
    samples_per_shard: NDArray[np.int64],
    seed: int,
    epoch: int,
    shuffle: bool,
    num_canonical_nodes: int,
    shuffle_block_size: int,
) -> NDArray[np.int64]:
    """Return all sample ids of an epoch in reading order, [samples] int64.

    With `shuffle`, streaming's py1e algorithm orders shards at random and moves samples within about
    `shuffle_block_size`; it does so in each of `num_canonical_nodes` equal parts of the data, from which batches then
    take samples in turn. So a batch mixes that many places of the data, and shards are still read nearly one after
    another.
    """
    samples = int(samples_per_shard.sum())
    if not shuffle:
        return np.arange(samples)
    parts = min(num_canonical_nodes, samples)
    order = streaming.base.shuffle.get_shuffle("py1e", samples_per_shard, parts, seed, epoch, shuffle_block_size)
    begins = samples * np.arange(parts + 1) // parts
    turns = samples // parts  # that every part has; some have one more
    order_in_turn = np.stack([order[begin : begin + turns] for begin in begins[:-1]], axis=1)
    return np.concatenate([order_in_turn.ravel(), order[begins[1:][np.diff(begins) > turns] - 1]])


def working_set(
    order: NDArray[np.int64], samples_per_shard: NDArray[np.int64], bytes_per_shard: NDArray[np.int64]
) -> int:
    """Return the most bytes of shards that are in use at a time while samples are read in `order`: a shard is from its
    first sample to its last."""
    shard = np.repeat(np.arange(len(samples_per_shard)), samples_per_shard)[order]
    first, last = np.zeros(len(samples_per_shard), np.int64), np.zeros(len(samples_per_shard), np.int64)
    places = np.arange(len(order))
    first[shard[::-1]] = places[::-1]  # of assignments to one place numpy keeps the last
    last[shard] = places
    change = np.zeros(len(order) + 1, np.int64)
    np.add.at(change, first, bytes_per_shard)
    np.add.at(change, last + 1, -bytes_per_shard)
    return int(change.cumsum().max())


class TrainStream:
    """An endless iterator over this rank's share of the global batches.

    folder, cache_folder, cache_limit_bytes
                        prepared data, local path or URL, and where its unpacked shards go (see SampleReader)
    global_batch_size   sequences per step over all ranks
    rank, world_size    of the data-parallel group; each step gives global_batch_size // world_size sequences
    seed, shuffle, num_canonical_nodes, shuffle_block_size
                        decide the order (see epoch_order)
    weights             of sources, for data packed by source (see mesatron_data.mixture); None for their natural shares
    workers             reader threads; 0 reads only when asked
    prefetch_batches    that each of them keeps ready
    timeout_seconds     for each batch

    Attributes: manifest, steps_per_epoch, dropped_samples (left out of each epoch), shares (of tokens, asked for, by
    source). Raises DataError for a global
    batch that the ranks cannot share or the data cannot fill and for a cache limit that the order does not fit into,
    and from __next__ for a missing or damaged shard, by name, or a batch that takes longer than the time-out.
    """

    def __init__(
        self,
        folder: str,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        num_canonical_nodes: int = 8,
        shuffle_block_size: int = 1 << 18,
        workers: int = 1,
        prefetch_batches: int = 2,
        timeout_seconds: float = 300.0,
        cache_folder: Path | None = None,
        cache_limit_bytes: int = 0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if global_batch_size % world_size:
            raise DataError(
                f"A global batch of {global_batch_size} sequences cannot be shared by {world_size} "
                f"processes: give a multiple of {world_size}."
            )
        self._reader = SampleReader(folder, "train", cache_folder, cache_limit_bytes)
        self.manifest = self._reader.manifest
        self.steps_per_epoch, self.dropped_samples = divmod(self._reader.samples, global_batch_size)
        if not self.steps_per_epoch:
            raise DataError(
                f"{folder} holds {self._reader.samples} training samples, fewer than one global batch of "
                f"{global_batch_size}: "
                f"prepare more text, or lower the global batch or context_length."
            )
        self._order_settings: dict[str, Any] = {
            "seed": seed,
            "shuffle": shuffle,
            "num_canonical_nodes": num_canonical_nodes,
            "shuffle_block_size": shuffle_block_size,
        }
        self._source_samples = self.manifest.splits["train"].source_samples
        self.shares = self._mix(folder, weights)
        self._weights = dict(weights) if weights is not None else None
        self._global_batch_size = global_batch_size
        self._rank = rank
        self._sequences = global_batch_size // world_size
        self._workers, self._prefetch_batches, self._timeout_seconds = workers, prefetch_batches, timeout_seconds
        self._step = 0
        self._prefetcher: Prefetcher[Batch] | None = None
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._orders_lock = threading.Lock()
        if cache_limit_bytes:
            self._check_limit(cache_limit_bytes)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(
                self._read, self._step, self._workers, self._prefetch_batches, self._timeout_seconds, "Training batch"
            )
        batch = self._prefetcher.next()
        self._step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, and what the order depends on, as plain JSON values."""
        epoch, step_in_epoch = divmod(self._step, self.steps_per_epoch)
        return {"epoch": epoch, "step_in_epoch": step_in_epoch} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; any number of processes may have saved it.

        Raises DataError when it belongs to other data or another order, RuntimeError when iteration has begun.
        """
        if self._prefetcher is not None:
            raise RuntimeError("load_state_dict must be called before the first batch is read")
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise DataError(
                    f"The saved data position has {name} {state.get(name)!r}, but this run has {value!r}, "
                    "which would change the order of "
                    f"the data: restore that setting or start a new run."
                )
        self._step = state["epoch"] * self.steps_per_epoch + state["step_in_epoch"]

    def global_batch(self, number: int) -> list[int]:
        """Return the sample ids of a global batch, counted from 0 over all epochs, over all ranks."""
        epoch, step_in_epoch = divmod(number, self.steps_per_epoch)
        begin = step_in_epoch * self._global_batch_size
        return self._order(epoch)[begin : begin + self._global_batch_size].tolist()

    def close(self) -> None:
        """End the reader threads."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def figures(self) -> dict[str, float]:
        """How reading goes in this process: batches ready now (0: training waits for the storage), and bytes of packed
        shards and seconds it took to fetch them, so far and over all readers."""
        cache = self._reader.cache
        ready = self._prefetcher.ready() if self._prefetcher else 0
        return {
            "batches_ready": float(ready),
            "fetched_bytes": float(cache.fetched_bytes),
            "fetch_seconds": cache.fetch_seconds,
        }

    def _identity(self) -> dict[str, Any]:
        return self._order_settings | {
            "fingerprint": self.manifest.fingerprint,
            "global_batch_size": self._global_batch_size,
            "weights": self._weights,
        }

    def _read(self, number: int) -> Batch:
        begin = self._rank * self._sequences
        return _read_batch(self._reader, self.global_batch(number)[begin : begin + self._sequences])

    def _check_limit(self, limit_bytes: int) -> None:
        sizes = self._reader.bytes_per_shard
        needed = working_set(self._order(0), self._reader.samples_per_shard, sizes)
        needed += int(sizes.max()) * (1 + self._workers)  # validation's, and those read ahead
        if limit_bytes < needed:
            raise DataError(
                f"data.cache_limit_bytes is {limit_bytes}, but this order of the data keeps {needed} bytes of shards "
                "in use at a time: raise it to that or more, or in a new run lower data.shuffle_block_size or "
                "data.num_canonical_nodes."
            )

    def _order(self, epoch: int) -> NDArray[np.int64]:
        with self._orders_lock:
            if epoch not in self._orders:
                # Readers ahead may be in the next epoch already; earlier ones are done with.
                self._orders = {known: order for known, order in self._orders.items() if known >= epoch - 1}
                self._orders[epoch] = self._make_order(epoch)
            return self._orders[epoch]

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        samples_per_shard = self._reader.samples_per_shard
        if not self._source_samples:
            return epoch_order(samples_per_shard, epoch=epoch, **self._order_settings)
        ends = samples_per_shard.cumsum()
        others = {name: value for name, value in self._order_settings.items() if name != "seed"}

        def of_source(first: int, end: int, seed: int, own_epoch: int) -> NDArray[np.int64]:
            shards = samples_per_shard[(ends > first) & (ends <= end)]  # a shard holds one source
            return first + epoch_order(shards, seed, own_epoch, **others)

        return mixed_order(self._source_samples, self.shares, self._order_settings["seed"], epoch, of_source)

    def _mix(self, folder: str, weights: Mapping[str, float] | None) -> dict[str, float]:
        if self._source_samples:
            return shares_of(self._source_samples, weights)
        if weights is not None:
            raise DataError(
                f"data.weights is set, but {folder} was packed without regard to sources: prepare it again with "
                "data.weights set and --overwrite."
            )
        counts = self.manifest.splits["train"]
        return {name: source.tokens / max(counts.tokens, 1) for name, source in counts.sources.items()}


class ValidationSet:
    """Every validation sample once, in stored order, or `max_samples` of them spread evenly over the split.

    Rank r of w reads samples r, r + w, ... of these. Each iteration starts anew. Batches hold `micro_batch_size`
    sequences, the last one maybe fewer, and ranks may get different numbers of batches. Arguments and errors are those
    of TrainStream.
    """

    def __init__(
        self,
        folder: str,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        max_samples: int | None = None,
        workers: int = 1,
        prefetch_batches: int = 2,
        timeout_seconds: float = 300.0,
        cache_folder: Path | None = None,
        cache_limit_bytes: int = 0,
    ) -> None:
        self._reader = SampleReader(folder, "validation", cache_folder, cache_limit_bytes)
        self.manifest = self._reader.manifest
        samples = min(self._reader.samples, max_samples or self._reader.samples)
        ids = [i * self._reader.samples // samples for i in range(rank, samples, world_size)]
        self._batches = _in_batches(ids, micro_batch_size)
        self._micro_batch_size, self._rank, self._world_size = micro_batch_size, rank, world_size
        self._workers, self._prefetch_batches, self._timeout_seconds = workers, prefetch_batches, timeout_seconds

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        prefetcher = Prefetcher(
            self._read, 0, self._workers, self._prefetch_batches, self._timeout_seconds, "Validation batch", len(self)
        )
        try:
            for _ in self._batches:
                yield prefetcher.next()
        finally:
            prefetcher.close()

    def first(self, samples: int) -> Iterator[Batch]:
        """This rank's share of the first `samples` samples of the split, whatever `max_samples` is."""
        ids = range(self._rank, min(samples, self._reader.samples), self._world_size)
        for batch in _in_batches(list(ids), self._micro_batch_size):
            yield _read_batch(self._reader, batch)

    def _read(self, position: int) -> Batch:
        return _read_batch(self._reader, self._batches[position])


def _in_batches(ids: list[int], size: int) -> list[list[int]]:
    return [ids[begin : begin + size] for begin in range(0, len(ids), size)]


def _read_batch(reader: SampleReader, sample_ids: list[int]) -> Batch:
    return collate([reader.read(sample_id) for sample_id in sample_ids], sample_ids, reader.manifest.bos_id)
