"""Profile one collective in two processes, whose profilers start at different times, and print what the first found.

python late_profiler.py FOLDER
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import profile

from mesatron.parallel import distributed
from mesatron.train.profile import profiled

world = distributed.start()
start = profile.start


def start_late(trace: profile) -> None:
    start(trace)
    time.sleep(4.0 * world.rank)


profile.start = start_late  # type: ignore[method-assign]
file = Path(sys.argv[1], f"{world.rank}.json.gz")
with profiled(file, world.device, world.barrier, alive=lambda: None) as figures:
    dist.all_reduce(torch.ones(3, device=world.device))
if world.is_first:
    print(json.dumps(figures))
distributed.stop()
