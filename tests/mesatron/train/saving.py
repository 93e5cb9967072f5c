"""Save behind training in one layout: `python saving.py FOLDER CONFIG...`, run by every process of a world.

For each config (alike but for ZeRO stage, precision and offloading) two updates are made, a save begins and a third
update follows at once. FOLDER/<number>-<rank>.pt gets what the save should hold: weights and moments put together by
DeepSpeed's own functions and an all-gather over the tensor group.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from mesatron_data.stream import TrainStream

from mesatron.config import accumulation_steps, load_config
from mesatron.parallel import distributed
from mesatron.parallel.engine import build_engine
from mesatron.parallel.layout import lay_out
from mesatron.parallel.shares import Share
from mesatron.parallel.zero import KINDS, ZeroEngine
from mesatron.train.saver import Hooks, Saver
from mesatron.train.snapshot import StartState, fragments, generator_states, specifications
from mesatron.train.timing import PhaseTimer


def gathered(engine: ZeroEngine, kind: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This process's share of a parameter, from all copies."""
    if engine.stage == 0:
        own = parameter if kind == "weight" else engine.engine.basic_optimizer.state[parameter][kind]
        return own.detach()
    return safe_get_full_fp32_param(parameter) if kind == "weight" else safe_get_full_optimizer_state(parameter, kind)


def joined(share: Share, part: torch.Tensor) -> torch.Tensor:
    """The whole tensor from the parts of a tensor group."""
    if share.dimension is None:
        return part.clone()
    parts = [torch.empty_like(part) for _ in range(share.group.size)]
    dist.all_gather(parts, part.contiguous(), group=share.group.handle)
    return torch.cat(parts, share.dimension).narrow(share.dimension, 0, share.whole[share.dimension])


world = distributed.start()
configs = [load_config(Path(path)) for path in sys.argv[2:]]
layout = lay_out(configs[0], world)
for number, config in enumerate(configs):
    engine = build_engine(config, layout, accumulation_steps(config, layout.data.size))
    engine.restore(StartState(None, engine, config).start_elements, ("weight",))
    stream = TrainStream(str(config.data.folder), config.train.global_batch_size, layout.data.rank, layout.data.size)
    batches = [[layout.piece(part) for part in next(stream).split(config.train.micro_batch_size)] for _ in range(3)]
    stream.close()
    timer = PhaseTimer(world.device)
    for batch in batches[:2]:
        engine.update(batch, 100.0, 1e-2, timer)
    engine._link_moments()
    expected = {
        f"{kind}/{name}": joined(engine.shares[name], gathered(engine, kind, parameter))
        for kind in KINDS
        for name, parameter in engine.parameters.items()
    }
    torch.save(expected, f"{sys.argv[1]}/{number}-{world.rank}.pt")
    with Saver(
        config.run_folder / "checkpoints", config.checkpoint, world, "1", specifications(engine, world),
        lambda engine=engine: fragments(engine), Hooks(lambda: None, print, lambda: None),
    ) as saver:  # fmt: skip
        saver.save(2, generator_states(world), {}, {})
        engine.update(batches[2], 100.0, 1e-2, timer)
world.barrier()
distributed.stop()
