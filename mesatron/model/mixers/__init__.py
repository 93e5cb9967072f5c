"""Mixers by name. A new one is a file here, a line in MIXERS and its section in `mesatron.config.schema`.

A mixer is a module with `forward(x [B, T, width], state, cu_seqlens, keep_state) -> (y [B, T, width], state)`, whose
state is None unless it is to be kept and has a size independent of T wherever the mathematics allows it, and with
`observed()`: scalars and tensors of its last forward pass by name, for the monitor.
"""

from __future__ import annotations

from torch import nn

from mesatron.config import ModelConfig
from mesatron.model.mixers.mesa import MesaMixer
from mesatron.model.seams import Seams

MIXERS: dict[str, type[nn.Module]] = {"mesa": MesaMixer}


def build_mixer(config: ModelConfig, seams: Seams) -> nn.Module:
    """One layer of the mixer that `config` names, which looks at other tokens through `seams`."""
    return MIXERS[config.mixer](config, seams)
