"""Gates of one forward pass under a ZeRO engine: `python horizons.py CONFIG OUTPUT`, run by every process of a world.

The start weights have gate biases of 6.9, which makes gamma about 0.999.
"""

import sys
from pathlib import Path

import torch

from mesatron.config import load_config
from mesatron.model.parameter import initial_value
from mesatron.parallel import distributed
from mesatron.parallel.layout import lay_out
from mesatron.parallel.zero import ZeroEngine

config = load_config(Path(sys.argv[1]))
world = distributed.start()
engine = ZeroEngine(config, lay_out(config, world), accumulation_steps=1)


def start_values(kind: str, name: str, start: int, stop: int) -> torch.Tensor:
    value = initial_value(name, engine.shapes()[name], engine.whole[name].info, seed=0).flatten()[start:stop]
    value = torch.nn.functional.pad(value, (0, stop - start - len(value)))
    return value + 6.9 if name.endswith("gamma.bias") else value


engine.restore(start_values, ("weight",))
tokens = torch.arange(2 * config.data.context_length).view(2, -1) % config.model.vocabulary_size
engine.losses(tokens, tokens, torch.tensor([0, tokens.shape[1], tokens.numel()]))
if world.is_first:
    torch.save([seen for tag, seen in engine.observed()[1].items() if tag.startswith("gamma/")], sys.argv[2])
distributed.stop()
