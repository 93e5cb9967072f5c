"""What a process of a world sees of one layout: `python witness.py CONFIG FOLDER`, run by every process.

Saves to FOLDER/rank-N.pt: the sequences it reads, replicated weights after two updates, the bytes of the second one by
group and collective, the matrix products beside each exchange of states, and the GPUs on which it holds memory.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mesatron_data.stream import TrainStream
from torch.utils._python_dispatch import TorchDispatchMode

from mesatron.config import accumulation_steps, load_config
from mesatron.parallel import distributed
from mesatron.parallel.context import Exchange
from mesatron.parallel.engine import build_engine
from mesatron.parallel.layout import lay_out
from mesatron.train.snapshot import StartState
from mesatron.train.timing import PhaseTimer

config = load_config(Path(sys.argv[1]))
layout = lay_out(config, distributed.start())
groups = {
    tuple(dist.get_process_group_ranks(group.handle)): name
    for name in ("copies", "pipeline", "context", "tensor")  # of equal sets of processes the later name
    if (group := getattr(layout, name)).size > 1
}


class Traffic(TorchDispatchMode):
    """Bytes of every collective: what goes in, for a gather this process's part. Products until now."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, str]] = Counter()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            sent = {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "allgather_": 1}.get(func._schema.name[6:], 0)
            group = next(x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            tensors = args[sent] if isinstance(args[sent], (list, tuple)) else [args[sent]]
            self.sent[groups.get(ranks, str(ranks)), name] += sum(x.numel() * x.element_size() for x in tensors)
        self.products += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def with_work_counted(traffic: Traffic) -> list[tuple[str, int]]:
    """From now on, of every exchange: which way it goes, and the products between its begin and the wait for it."""
    beside: list[tuple[str, int]] = []
    begun: dict[Exchange, tuple[str, int]] = {}

    def beginning(begin: Callable) -> Callable:
        def counted(exchange: Exchange, x: torch.Tensor) -> Any:
            begun[exchange] = begin.__name__, traffic.products
            return begin(exchange, x)

        return counted

    def waiting(wait: Callable) -> Callable:
        def counted(exchange: Exchange) -> Any:
            way, before = begun.pop(exchange)
            beside.append((way, traffic.products - before))
            return wait(exchange)

        return counted

    Exchange.gather, Exchange.sum = beginning(Exchange.gather), beginning(Exchange.sum)
    Exchange.wait = waiting(Exchange.wait)
    return beside


engine = build_engine(config, layout, accumulation_steps(config, layout.data.size))
engine.restore(StartState(None, engine, config).start_elements, ("weight",))
stream = TrainStream(str(config.data.folder), config.train.global_batch_size, layout.data.rank, layout.data.size)
ids, traffic, shapes = [], Traffic(), set()
for block in engine.blocks().values():
    block.register_forward_pre_hook(lambda _, inputs: shapes.add(inputs[0].shape))
for step in range(2):
    batch = next(stream)
    ids += batch.sample_ids.tolist()
    parts = [layout.piece(part) for part in batch.split(config.train.micro_batch_size)]
    if step == 1:
        traffic.__enter__()
        beside = with_work_counted(traffic)
    engine.update(parts, 1000.0, 1e-3, PhaseTimer(layout.world.device))
traffic.__exit__(None, None, None)
assert shapes == {engine.seams.residual_shape(config.train.micro_batch_size, config)}, "graphs would never be taken"
assert not engine.engine.tput_timer.initialized, "DeepSpeed's timer would wait for the GPU at every forward pass"
stream.close()
weights = {name: parameter.detach() for name, parameter in engine.parameters.items()}
replicated = {name: weights[name].clone() for name, share in engine.shares.items() if share.dimension is None}
place = (layout.data.rank, layout.context.rank, layout.tensor.rank, layout.pipeline.rank)
rank = layout.world.rank
gpus = [number for number in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(number)]
torch.save(
    {"place": place, "ids": ids, "replicated": replicated, "sent": dict(traffic.sent), "beside": beside, "gpus": gpus},
    f"{sys.argv[2]}/{rank}.pt",
)
layout.world.barrier()
distributed.stop()
