"""Sliding-window attention: the Transformer's mixer over the last `window` tokens alone (paper section N)."""

from __future__ import annotations

from mesatron.config import ModelConfig
from mesatron.model.mixers.transformer import TransformerMixer
from mesatron.model.seams import Seams


class SWAMixer(TransformerMixer):
    """Softmax attention over a token and the window - 1 before it, whose state is as long."""

    def __init__(self, config: ModelConfig, seams: Seams, window: int | None = None) -> None:
        super().__init__(config, seams, window or config.swa.window)
