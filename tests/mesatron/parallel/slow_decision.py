"""Decisions of the first process that take longer than a collective may, in each process of a world."""

import datetime
import time

import pytest

from mesatron.errors import DataError
from mesatron.parallel import distributed

distributed.COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=5)
world = distributed.start()
waited: list[float] = []


def decide() -> str:
    time.sleep(8)
    return "decided"


def fail() -> str:
    time.sleep(6)
    raise DataError("A shard is damaged.")


assert world.from_first(decide, lambda: waited.append(time.monotonic())) == "decided"
assert world.is_first or (len(waited) > 5 and waited[-1] - waited[0] > 2)
with pytest.raises(DataError) as failed:
    world.from_first(fail, lambda: None)
assert failed.value.in_all_processes
assert world.from_first(lambda: "at once") == "at once"
distributed.stop()
