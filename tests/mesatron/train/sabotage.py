"""Run the train verb with one thing going wrong: `python sabotage.py FAULT=VALUE train CONFIG...`.

inf=3,4     the last process's gradient is not finite in these steps
kill=7      the process kills itself in step 7, after its first backward pass of it
full=7      from step 7 on the last process cannot write to any file, as on a full disk
deaf=7      from step 7 on the last process cannot reach the store at which all have met
still=7     step 7 changes nothing, so that what is saved after it is what was restored
memory=N    N bytes more than at the start of the rehearsal is all the memory there is
"""

import os
import re
import resource
import runpy
import signal
import sys
from pathlib import Path

from torch.distributed import DistNetworkError

import mesatron
from mesatron.checkpoint.agreement import Agreement
from mesatron.parallel.zero import ZeroEngine
from mesatron.train.loop import Trainer

fault, value = sys.argv[1].split("=")
steps = [int(number) for number in value.split(",")]
now = {"step": 0}
train_step, backward, rehearse = Trainer._train_step, ZeroEngine.backward, Trainer._rehearse


def lose_connection(*_: object) -> None:
    raise DistNetworkError("connection reset")


def sabotaged_step(trainer: Trainer) -> None:
    now["step"] = trainer.step + 1
    if fault == "full" and now["step"] in steps and trainer.world.rank == trainer.world.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if fault == "deaf" and now["step"] in steps and trainer.world.rank == trainer.world.size - 1:
        Agreement.tell = Agreement.fail = Agreement.failure = lose_connection
    if fault == "still" and now["step"] in steps:
        trainer.step += 1
    else:
        train_step(trainer)


def sabotaged_backward(engine: ZeroEngine, loss_sum, global_targets, last) -> None:
    spoilt = fault == "inf" and now["step"] in steps and engine.layout.world.rank == engine.layout.world.size - 1
    backward(engine, loss_sum * float("inf") if spoilt else loss_sum, global_targets, last)
    if fault == "kill" and now["step"] in steps:
        os.kill(os.getpid(), signal.SIGKILL)


def sabotaged_rehearsal(trainer: Trainer) -> None:
    if fault == "memory":
        kilobytes = re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]
        limit = int(kilobytes) * 1024 + steps[0]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    rehearse(trainer)


Trainer._train_step, ZeroEngine.backward, Trainer._rehearse = sabotaged_step, sabotaged_backward, sabotaged_rehearsal
program = Path(mesatron.__file__).with_name("__main__.py")
sys.argv = [str(program), *sys.argv[2:]]
runpy.run_path(str(program), run_name="__main__")
