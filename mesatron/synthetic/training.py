"""Learn a task and say how well: a plain loop for one process, without the checkpoints and watches of a long run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from mesatron_data.batch import IGNORED_TARGET
from torch import Tensor

from mesatron.config.schema import TrainConfig
from mesatron.model.backbone import Backbone
from mesatron.synthetic.tasks import Examples
from mesatron.train.schedule import learning_rate


def fit(
    model: Backbone, examples: Examples, train: TrainConfig, device: torch.device, report: Callable[[int, float], None]
) -> int:
    """Train `model`, on `device` already, for `train.steps` batches in an order drawn from `train.seed`.

    `report` gets the number of steps done and the mean loss of an epoch after each. Returns the steps taken: fewer
    where a gradient was not finite, with the weights as they were before it.
    """
    tokens, targets = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in examples)
    order = torch.Generator().manual_seed(train.seed)
    optimizer = _optimizer(model, train)
    step = 0
    while step < train.steps:
        losses = []
        for batch in torch.randperm(len(tokens), generator=order).to(device).split(train.global_batch_size):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(train, step + 1)
            batch_targets = targets[batch]
            loss = model(tokens[batch], batch_targets).sum() / (batch_targets != IGNORED_TARGET).sum()
            loss.backward()
            if not torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad_norm).isfinite():
                return step
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            step += 1
            if step == train.steps:
                break
        report(step, float(torch.stack(losses).mean()))
    return step


def _optimizer(model: Backbone, train: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, whose decay applies to matrices only, as in a run."""
    decayed = [p for p in model.parameters() if p.info.weight_decay]  # type: ignore[attr-defined]
    others = [p for p in model.parameters() if not p.info.weight_decay]  # type: ignore[attr-defined]
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, train.start_lr, (train.beta1, train.beta2), train.epsilon)


@torch.no_grad()
def accuracy(predict: Callable[[Tensor], Tensor], examples: Examples, batch_size: int) -> float:
    """The share of scored positions at which `predict`, tokens [B, T] to tokens [B, T], says the target."""
    right = scored = 0
    for tokens, targets in zip(*(torch.from_numpy(x).split(batch_size) for x in examples), strict=True):
        said = predict(tokens).cpu()
        asked = targets != IGNORED_TARGET
        right += int((said == targets)[asked].sum())
        scored += int(asked.sum())
    return right / scored


def likeliest(model: Backbone, device: torch.device) -> Callable[[Tensor], Tensor]:
    """What a model says at every position of tokens [B, T]."""
    return lambda tokens: model.embedding(model.hidden(tokens.to(device))).argmax(-1)
