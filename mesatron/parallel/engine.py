"""The engine that a layout asks for."""

from __future__ import annotations

from mesatron.config import Config
from mesatron.parallel.layout import Layout
from mesatron.parallel.zero import ZeroEngine


def build_engine(config: Config, layout: Layout, accumulation_steps: int) -> ZeroEngine:
    """This process's share of the model under DeepSpeed, in a pipeline if `layout` has one."""
    if layout.pipeline.size == 1:
        return ZeroEngine(config, layout, accumulation_steps)
    from mesatron.parallel.pipeline import PipelineEngine

    return PipelineEngine(config, layout, accumulation_steps)
