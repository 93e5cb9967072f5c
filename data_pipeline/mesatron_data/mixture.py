"""Mixing sources by weight, as an order of the samples that data packed by source hold.

Each source is an endless row of its samples, each of its own epochs shuffled anew, so that a sample comes again only
after all others of its source. An epoch of the mixture takes the next samples of every row, as many as its share of all
samples in the data, and lays them out evenly, so that every batch has very nearly the mixture that was asked for. What
an epoch holds is a function of seed, epoch and weights alone.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from mesatron_data.errors import DataError

SourceOrder = Callable[[int, int, int, int], NDArray[np.int64]]
"""First sample, end, seed and epoch to the sample ids of these in reading order."""


def shares_of(source_samples: Mapping[str, int], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return the share of each source of the data; without weights, what it has. Raises DataError for weights that name
    other sources or one without a sample, or that are all 0."""
    wanted = dict(weights) if weights is not None else {name: float(count) for name, count in source_samples.items()}
    for name, weight in wanted.items():
        if name not in source_samples:
            raise DataError(
                f"data.weights names the source {name}, but the prepared data have {', '.join(source_samples)}."
            )
        if weight and not source_samples[name]:
            raise DataError(f"The source {name} fills no sample, but data.weights asks for it: leave it out.")
    total = sum(wanted.values())
    if total <= 0:
        raise DataError("data.weights asks for nothing: give at least one source a weight above 0.")
    return {name: wanted.get(name, 0.0) / total for name in source_samples}


def mixed_order(
    source_samples: Mapping[str, int], shares: Mapping[str, float], seed: int, epoch: int, order: SourceOrder
) -> NDArray[np.int64]:
    """Return the sample ids of an epoch, [all samples] int64, some of them more than once where a source has to repeat.

    source_samples  how many samples each source has; the ids of the first come first
    """
    counts = _counts(sum(source_samples.values()), shares)
    ids, places, first = [], [], 0
    for number, (name, available) in enumerate(source_samples.items()):
        count = counts[name]
        if count:
            row, position = [], epoch * count
            while position < (epoch + 1) * count:
                own_epoch, done = divmod(position, available)
                whole = order(first, first + available, seed + number, own_epoch)
                row.append(whole[done : done + (epoch + 1) * count - position])
                position += len(row[-1])
            ids.append(np.concatenate(row))
            places.append((np.arange(count) + 0.5) / count)
        first += available
    return np.concatenate(ids)[np.argsort(np.concatenate(places), kind="stable")]


def _counts(samples: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers with the sum `samples` that are nearest to the shares (largest remainders are rounded up)."""
    exact = {name: share * samples for name, share in shares.items()}
    counts = {name: int(number) for name, number in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: samples - sum(counts.values())]:
        counts[name] += 1
    return counts
