"""What an attempt says of itself before its first step."""

from __future__ import annotations

from mesatron_data.stream import TrainStream
from mesatron_kernels import Choice

from mesatron.config import Config
from mesatron.model import fused
from mesatron.parallel.layout import Layout
from mesatron.train.run import ResumePoint


def announcement(
    config: Config, start: ResumePoint, kernels: dict[str, Choice], layout: Layout, accumulation_steps: int,
    stream: TrainStream,
) -> list[str]:  # fmt: skip
    """The lines: run, model, kernels, layout, batch arithmetic, data and steps."""
    train, saves, world = config.train, config.checkpoint, layout.world
    where = f"continues {start.checkpoint}" if start.checkpoint else "starts from seed " + str(train.seed)
    mixers = " ".join(map(str, config.model.mixers))
    chosen = ", ".join(f"{name} {choice.implementation} ({choice.reason})" for name, choice in kernels.items())
    return [
        f"run        {config.run_folder} ({where}; {start.attempt})",
        *(f"note       {note}" for note in start.notes),
        f"model      {mixers}, {config.model.parameter_count():,} parameters, {train.precision}",
        f"kernels    {chosen}; around them {fused.form(config.model.implementation, world.device)}"
        f"{', blocks as CUDA graphs' if train.cuda_graphs else ''}",
        f"processes  {world.size} on {world.device.type}, ZeRO-{config.parallel.zero_stage}",
        f"layout     {layout.describe()}",
        f"batch      {train.global_batch_size} sequences = {train.micro_batch_size} x {accumulation_steps} "
        f"accumulation x {layout.data.size} data-parallel; {config.tokens_per_step:,} tokens per step",
        f"data       {config.data.folder}, {stream.steps_per_epoch} steps per epoch, "
        f"{stream.dropped_samples} sequences left over",
        f"steps      {start.step} of {train.steps} done, checkpoint every {saves.every_steps}"
        f"{f', on the nodes every {saves.local_every_steps}' if saves.local_folder else ''}",
    ]
