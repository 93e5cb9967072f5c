"""Mixers by name. A new one is a file here, a line in MIXERS and in `mesatron.config.mixers`, and its config section.

A mixer is a module with `forward(x [B, T, width], state, cu_seqlens, keep_state) -> (y [B, T, width], state)`, whose
state is None unless it is to be kept and has a size independent of T wherever the mathematics allows it, and with
`observed()`: scalars and tensors of its last forward pass by name, for the monitor.
"""

from __future__ import annotations

from torch import nn

from mesatron.config import ModelConfig
from mesatron.model.mixers.deltanet import DeltaNetMixer
from mesatron.model.mixers.gated_deltanet import GatedDeltaNetMixer
from mesatron.model.mixers.gla import GLAMixer
from mesatron.model.mixers.hawk import HawkMixer
from mesatron.model.mixers.mamba2 import Mamba2Mixer
from mesatron.model.mixers.mesa import MesaMixer
from mesatron.model.mixers.mesa_rls import MesaRLSMixer
from mesatron.model.mixers.mlstm import MLSTMMixer
from mesatron.model.mixers.swa import SWAMixer
from mesatron.model.mixers.transformer import TransformerMixer
from mesatron.model.seams import Seams

MIXERS: dict[str, type[nn.Module]] = {
    "mesa": MesaMixer, "mesa_rls": MesaRLSMixer, "gla": GLAMixer, "mamba2": Mamba2Mixer, "mlstm": MLSTMMixer,
    "deltanet": DeltaNetMixer, "gated_deltanet": GatedDeltaNetMixer, "hawk": HawkMixer,
    "transformer": TransformerMixer, "swa": SWAMixer,
}  # fmt: skip


def build_mixer(config: ModelConfig, seams: Seams, layer: int = 0) -> nn.Module:
    """The mixer that `config` names for a layer, which looks at other tokens through `seams`."""
    mixer = config.mixer_of(layer)
    return MIXERS[mixer.name](config, seams, *([mixer.window] if mixer.window else []))
