"""Which processes hold up the others, from the time that each one takes by itself."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

READINGS = 8


class Stragglers:
    """Names processes whose mean time over the last READINGS readings is more than `ratio` times the median's.

    hosts: the host of every process, by rank. ratio 0 names nobody.
    """

    def __init__(self, ratio: float, hosts: Sequence[str]) -> None:
        self._ratio, self._hosts = ratio, hosts
        self._readings: deque[Sequence[float]] = deque(maxlen=READINGS)
        self._slow: set[int] = set()

    def note(self, seconds: Sequence[float]) -> tuple[dict[str, float], list[str]]:
        """Take the seconds of every process, by rank.

        Returns scalars (the slowest process and its mean over the median's), and, from READINGS readings on, a line for
        each process that has become slow or is so no longer.
        """
        self._readings.append(seconds)
        if not self._ratio or len(seconds) == 1:
            return {}, []
        means = [statistics.fmean(of_one) for of_one in zip(*self._readings, strict=True)]
        middle = statistics.median_low(means)
        ratios = [mean / middle for mean in means]
        slowest = max(range(len(ratios)), key=ratios.__getitem__)
        enough = len(self._readings) == READINGS
        slow = {rank for rank, ratio in enumerate(ratios) if ratio > self._ratio and enough}
        lines = [
            f"process {rank} on {self._hosts[rank]} is slow: data and forward pass take it {means[rank]:.3f} s, the "
            f"others {middle:.3f} s"
            for rank in sorted(slow - self._slow)
        ]
        lines += [f"process {rank} on {self._hosts[rank]} is slow no longer" for rank in sorted(self._slow - slow)]
        self._slow = slow
        return {"time/slowest_process": float(slowest), "time/slowest_over_median": ratios[slowest]}, lines
