"""Where non-finite numbers began: the first bad layer of a skipped step, and its inputs in a file to replay.

A skipped step has changed nothing, so its micro-batches are computed once more, this time with every block watched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from mesatron_data.batch import Batch
from safetensors.torch import save
from torch import Tensor, nn

from mesatron.config import Config, dump_config
from mesatron.files import replace_file
from mesatron.parallel.layout import Layout
from mesatron.parallel.zero import ZeroEngine
from mesatron.train.snapshot import whole_weights

EMBEDDING, OUTPUT = "embedding", "output"
"""Names of the layers before the first block and after the last one: final norm, embedding and loss."""


class Inspection:
    """Looks at every block of this process while some micro-batches are computed; ends as a context manager does.

    bad: the place of the first bad layer, counted along the computation: forward 0 for the embedding, 1 to L for the
    blocks, L + 1 for the output; then backward from the output, L + 2, to the first block, 2 L + 2. None if all is
    finite. inputs: what to feed that layer to see it again.
    """

    def __init__(self, engine: ZeroEngine) -> None:
        self.layers = engine.config.model.layers
        self.bad: int | None = None
        self.inputs: dict[str, Tensor] = {}
        self._hooks = [
            block.register_forward_hook(partial(self._forward, number)) for number, block in engine.blocks().items()
        ]
        self._first_input = self._hidden = self._gradient = torch.empty(0)

    def __enter__(self) -> Inspection:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._first_input = self._hidden = self._gradient = torch.empty(0)

    @torch.no_grad()
    def look_forward(self, losses: Callable[..., Tensor], batch: Batch) -> None:
        """Compute the losses of a micro-batch, without gradients."""
        found = losses(batch.tokens, batch.targets, batch.cu_seqlens)
        if self.bad == 0:
            self.inputs = {"input": batch.tokens}
        self._note(self.layers + 1, found, input=self._hidden, targets=batch.targets)

    def look_backward(self, batch: Batch, losses: Callable[..., Tensor], scale: float) -> None:
        """Compute the gradients of `scale` times the sum of a micro-batch's losses, of activations alone: those of
        parameters would be added up."""
        loss = losses(batch.tokens, batch.targets, batch.cu_seqlens).sum() * scale
        self._hidden.register_hook(partial(self._backward, self.layers, {"targets": batch.targets}, self._hidden))
        torch.autograd.grad(loss, self._first_input)

    def _forward(self, number: int, _: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        carried = arguments[0]
        x, starts = carried if isinstance(carried, tuple) else (carried, (*arguments, None, None)[2])
        y = result[0] if isinstance(result, tuple) else result
        rest = {} if starts is None else {"cu_seqlens": starts}
        if x.requires_grad and torch.is_grad_enabled():
            if number == 0:
                self._first_input = x
            x.register_hook(partial(self._backward, number, rest, x))
        else:
            # Before the first block of a later stage another process knows better, and is the one that is believed.
            self._note(number, x)
            self._note(number + 1, y, input=x, **rest)
        self._hidden = y

    def _backward(self, number: int, rest: dict[str, Tensor], x: Tensor, gradient: Tensor) -> None:
        """`gradient` has come out of block `number`, or of the output layer, whose input is `x`."""
        after = {"grad_output": self._gradient} if number < self.layers else {}
        self._note(2 * self.layers + 2 - number, gradient, input=x, **after, **rest)
        self._gradient = gradient

    def _note(self, place: int, value: Tensor, **inputs: Tensor) -> None:
        if self.bad is None and not value.isfinite().all():
            self.bad = place
            self.inputs = {name: tensor.detach() for name, tensor in inputs.items()}


def layer_at(place: int, layers: int) -> tuple[str, str]:
    """Name and direction of a place as Inspection counts them: ("blocks.3", "backward")."""
    direction = "forward" if place <= layers + 1 else "backward"
    number = place if direction == "forward" else 2 * layers + 3 - place
    return {0: EMBEDDING, layers + 1: OUTPUT}.get(number, f"blocks.{number - 1}"), direction


def dump_first_bad_layer(
    engine: ZeroEngine, layout: Layout, config: Config, micro_batches: Sequence[Batch], global_targets: float,
    step: int, alive: Callable[[], None],
) -> str:  # fmt: skip
    """In all processes, after a skipped `step`: write the inputs of the layer where non-finite numbers began.

    One file `nonfinite/step-.../rank-...safetensors` of the run folder, of the first process that has that layer: its
    inputs there (`input`; `targets`, `cu_seqlens`, `grad_output`), its whole fp32 parameters (`parameter/<name>`), and
    as metadata the config and `layer`, `direction`, `step`, `rank` and `sample_ids`. Returns what was found, in a few
    words. Backward passes of pipelines are not repeated. Raises DiskFullError.
    """
    with Inspection(engine) as inspection, engine.evaluating():
        culprit = _look(inspection, partial(inspection.look_forward, engine.losses), micro_batches, alive)
    place = _earliest(inspection.bad, layout)
    if place is None and layout.pipeline.size == 1:
        look = partial(Inspection.look_backward, losses=engine.bare_losses, scale=layout.copies.size / global_targets)
        with Inspection(engine) as inspection, engine.apart():
            culprit = _look(inspection, partial(look, inspection), micro_batches, alive)
        place = _earliest(inspection.bad, layout)
    if place is None:
        what = "activations" if layout.pipeline.size > 1 else "activations and their gradients"
        return f"computed again, all {what} are finite"
    position, rank = place
    layer, direction = layer_at(position, config.model.layers)
    prefixes = {EMBEDDING: ("embedding.",), OUTPUT: ("norm.", "embedding.")}.get(layer, (f"{layer}.",))
    weights = whole_weights(engine, layout.world, prefixes)
    parameters = {f"parameter/{name}": tensor for name, tensor in weights.items()}
    path = config.run_folder / "nonfinite" / f"step-{step:08d}" / f"rank-{rank:05d}.safetensors"
    if layout.world.rank == rank and culprit is not None:
        about = {
            "layer": layer, "direction": direction, "step": step, "rank": rank,
            "sample_ids": culprit.sample_ids.tolist(),
        }  # fmt: skip
        tensors = {name: tensor.contiguous().cpu() for name, tensor in (inspection.inputs | parameters).items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [save(tensors, {"config": dump_config(config), "about": json.dumps(about)})])
    return f"non-finite numbers begin in the {direction} pass of {layer} in process {rank}, see mesatron replay {path}"


def _look(
    inspection: Inspection, look: Callable[[Batch], None], micro_batches: Sequence[Batch], alive: Callable[[], None]
) -> Batch | None:
    """Look at every micro-batch, since other processes may need this one for each; return the first bad one."""
    culprit = None
    for batch in micro_batches:
        alive()
        look(batch)
        if culprit is None and inspection.bad is not None:
            culprit = batch
    return culprit


def _earliest(bad: int | None, layout: Layout) -> tuple[int, int] | None:
    """The smallest place of any process, and the first process that has it."""
    size = layout.world.size
    nothing = 1 << 40
    smallest = -layout.world.max(-(nothing if bad is None else bad * size + layout.world.rank))
    return None if smallest == nothing else divmod(smallest, size)
