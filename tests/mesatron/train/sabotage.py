"""Run the train verb with one thing going wrong: `python sabotage.py FAULT=VALUE train CONFIG...`.

inf=3,4     the last process's gradient is not finite in these steps
weight=3    a weight of block 1 is so large before step 3 that the block's output overflows
gradient=3  from step 3 on the gradient that leaves the mixer of block 1 is not finite
kill=7      the process kills itself in step 7, after its first backward pass of it
full=7      from step 7 on the last process cannot write to any file, as on a full disk
deaf=7      from step 7 on the last process cannot reach the store at which all have met
still=7     step 7 changes nothing, so that what is saved after it is what was restored
memory=N    N bytes more than at the start of the rehearsal is all the memory there is
signal=7    the last process sends itself SIGUSR1, SIGTERM and SIGUSR1 while it works on step 7;
            instead of a step: rehearse, validate or save, at the beginning of the first one
wait=7      the first process waits for a line on its standard input before step 7; with wait=7,weight
            within it, in which that weight is so large
hang=7      the last process waits for something that never comes while it works on step 7
slow=N      each batch takes N tenths of a second longer, the rehearsal 5 N and each tensor saved or restored N / 20
garbage=40,41  the tokens of these global batches, counted from 0, are those that are rare elsewhere
lag=N       every block takes the last process N hundredths of a second longer, and it has used a GiB more
stuck=NAME  nothing of that name can be renamed, as on a bad disk
mapped=7    the process ends with code 1 before step 7 if it still maps files of a checkpoint
request=7   a file that asks to stop appears in the run folder in step 7; request=save: when the first step is saved;
            request=save,any: one to any attempt
"""

import dataclasses
import errno
import os
import re
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mesatron_data.batch import Batch
from mesatron_data.stream import TrainStream
from torch.distributed import DistNetworkError

import mesatron
from mesatron.checkpoint.agreement import Agreement
from mesatron.model.backbone import Block
from mesatron.parallel.distributed import World
from mesatron.parallel.zero import ZeroEngine
from mesatron.train.loop import Trainer
from mesatron.train.stop import REQUEST_FILE

fault, value = sys.argv[1].split("=")
steps = [int(number) for number in value.split(",") if number.isdigit()]
now = {"step": 0}
train_step, rehearse = Trainer._train_step, Trainer._rehearse
read = TrainStream._read
backward, set_lr = ZeroEngine.backward, ZeroEngine._set_lr


def lose_connection(*_: object) -> None:
    raise DistNetworkError("connection reset")


def lagging(forward: Callable) -> Callable:
    def sabotaged(*arguments: object, **options: object) -> object:
        if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            work(0.1)
        return forward(*arguments, **options)

    return sabotaged


def send_signals(world: World) -> None:
    if world.rank == world.size - 1:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)


def read_garbage(stream: TrainStream, number: int) -> Batch:
    batch = read(stream, number)
    if number not in steps:
        return batch
    size = stream.manifest.vocabulary_size
    swapped = [torch.where(x > 1, size + 1 - x, x) for x in (batch.tokens, batch.targets)]
    return dataclasses.replace(batch, tokens=swapped[0], targets=swapped[1])


def spoil_gradient(_: object, arguments: tuple) -> tuple | None:
    x = arguments[0]
    return (SpoiltGradient.apply(x), *arguments[1:]) if torch.is_grad_enabled() else None


class SpoiltGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


def sabotaged_step(trainer: Trainer) -> bool:
    now["step"] = trainer.step + 1
    if value.isdecimal() and fault == "wait" and now["step"] in steps and trainer.world.is_first:
        sys.stdin.readline()
    if fault == "request" and now["step"] in steps:
        request_stop(trainer)
    if "weight" in (fault, value.partition(",")[2]) and now["step"] in steps:
        kept = {(kind, name): own.clone() for kind, name, own in trainer.engine.kept()}
        for place in kept.keys() & {("weight", "blocks.1.mlp.down.weight")}:
            kept[place].fill_(3e38)
        trainer.engine.restore_kept(lambda kind, name: kept[kind, name])
    if fault == "gradient" and now["step"] in steps and 1 in trainer.engine.blocks():
        trainer.engine.blocks()[1].mixer.register_forward_pre_hook(spoil_gradient)
    if fault == "mapped" and now["step"] in steps and "/step-0" in Path("/proc/self/maps").read_text():
        os._exit(1)
    if fault == "full" and now["step"] in steps and trainer.world.rank == trainer.world.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if fault == "deaf" and now["step"] in steps and trainer.world.rank == trainer.world.size - 1:
        Agreement.tell = Agreement.fail = Agreement.failure = lose_connection
    if fault == "still" and now["step"] in steps:
        trainer.step += 1
        trainer.data_state = trainer.stream.state_dict()
        return True
    return train_step(trainer)


def sabotaged_backward(engine: ZeroEngine, loss_sum, global_targets, last) -> None:
    spoilt = fault == "inf" and now["step"] in steps and engine.layout.world.rank == engine.layout.world.size - 1
    if fault == "wait" and not value.isdecimal() and now["step"] in steps:
        sys.stdin.readline()
    backward(engine, loss_sum * float("inf") if spoilt else loss_sum, global_targets, last)
    if fault == "kill" and now["step"] in steps:
        os.kill(os.getpid(), signal.SIGKILL)


def sabotaged_rehearsal(trainer: Trainer) -> None:
    if fault == "memory":
        kilobytes = re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]
        limit = int(kilobytes) * 1024 + steps[0]
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    rehearse(trainer)


def sabotaged_set_lr(engine: ZeroEngine, lr: float) -> None:
    set_lr(engine, lr)
    if fault == "signal" and now["step"] in steps:
        send_signals(engine.layout.world)
    if fault == "hang" and now["step"] in steps and engine.layout.world.rank == engine.layout.world.size - 1:
        threading.Event().wait()
    if fault == "slow" and not now["step"]:
        work(5)


def work(times: float) -> None:
    end = time.monotonic() + times * steps[0] / 10
    while time.monotonic() < end:
        pass


def refusing(rename: Callable) -> Callable:
    def sabotaged(source: str | os.PathLike[str], *arguments: object, **options: object) -> None:
        if Path(source).name == value:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        rename(source, *arguments, **options)

    return sabotaged


def slowly(function: Callable, times: float) -> Callable:
    def slow(*arguments: object, **options: object) -> object:
        work(times)
        return function(*arguments, **options)

    return slow


def request_stop(trainer: Trainer) -> None:
    if trainer.world.is_first:
        attempt = "null" if value.endswith(",any") else 1
        request = f'{{"reason": "enough", "code": 75, "attempt_at_most": {attempt}}}'
        (trainer.config.run_folder / REQUEST_FILE).write_text(request)


def before(moment: Callable, disturb: Callable[[Trainer], None]) -> Callable:
    def sabotaged(trainer: Trainer) -> None:
        disturb(trainer)
        moment(trainer)

    return sabotaged


Trainer._train_step, Trainer._rehearse = sabotaged_step, sabotaged_rehearsal
ZeroEngine.backward, ZeroEngine._set_lr = sabotaged_backward, sabotaged_set_lr
if fault == "garbage":
    TrainStream._read = read_garbage
if fault == "stuck":
    os.rename = refusing(os.rename)
if fault == "lag":
    Block.forward = lagging(Block.forward)
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        bytearray(b"x") * 2**30
if fault == "slow":
    ZeroEngine.losses, ZeroEngine._own = slowly(ZeroEngine.losses, 1), slowly(ZeroEngine._own, 0.05)
if fault in ("signal", "request") and not steps:
    disturb = request_stop if fault == "request" else lambda trainer: send_signals(trainer.world)
    moment = f"_{value.partition(',')[0]}"
    setattr(Trainer, moment, before(getattr(Trainer, moment), disturb))
program = Path(mesatron.__file__).with_name("__main__.py")
sys.argv = [str(program), *sys.argv[2:]]
runpy.run_path(str(program), run_name="__main__")
