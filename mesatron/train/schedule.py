"""The learning rate of every step."""

from __future__ import annotations

import math

from mesatron.config.schema import TrainConfig


def learning_rate(train: TrainConfig, step: int) -> float:
    """Learning rate of update `step`, 1 to `train.steps`: a function of the step alone, so a resume cannot shift it.

    Linear from `start_lr` (step 1) to `peak_lr` (step `warmup_steps` + 1). Then, for `cosine`, half a cosine down to
    `peak_lr` x `final_lr_fraction` at the last step (paper section G.3); for `wsd`, constant until the last
    `decay_fraction` of all steps, then linear down to the same end.
    """
    done = step - 1
    final_lr = train.peak_lr * train.final_lr_fraction
    if done < train.warmup_steps:
        return train.start_lr + (train.peak_lr - train.start_lr) * done / train.warmup_steps
    if train.schedule == "cosine":
        length = max(1, train.steps - 1 - train.warmup_steps)
        progress = (done - train.warmup_steps) / length
        return final_lr + (train.peak_lr - final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    remaining = min(1.0, (train.steps - 1 - done) / train.decay_steps)
    return final_lr + (train.peak_lr - final_lr) * remaining
