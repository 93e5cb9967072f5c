"""What a run computes does not depend on how a batch is spread over processes, accumulation steps and ZeRO stages.

Checked against one process that accumulates, and against a plain torch loop. Figures are read back from metrics.jsonl
and tensors from the checkpoints. Width, heads, vocabulary and the processes divide nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mesatron_data.batch import IGNORED_TARGET
from mesatron_data.stream import TrainStream

from mesatron.config import load_config
from mesatron.model.backbone import Backbone
from mesatron.model.parameter import initialize

STAGES = (0, 1, 2, 3)


@pytest.fixture
def trained(tmp_path: Path, odd_config: Callable, train: Callable, run_of: Callable) -> Callable[..., Any]:
    """`trained(data, processes, **overrides)` trains a new run of 12 sequences a step and gives its folder."""
    number = iter(range(100))

    def run(data: Path, processes: int, **overrides: Any) -> Any:
        settings = {"train.global_batch_size": 12, "train.micro_batch_size": 3} | overrides
        config = odd_config(tmp_path / str(next(number)), data, **settings)
        outcome = train(processes, config)
        assert outcome.exit_code == 0, outcome.errors
        return run_of(config)

    return run


def test_any_split_of_the_batch_gives_the_same_curve(trained: Callable, wide_data: Path, difference: Callable) -> None:
    """Accumulation over 4, 2, 1 and 2 passes with a vocabulary of 50257."""
    alone = trained(wide_data, 1, **{"train.steps": 20})
    for processes, micro_batch in [(2, 3), (4, 3), (3, 2)]:
        split = trained(wide_data, processes, **{"train.steps": 20, "train.micro_batch_size": micro_batch})
        for tag in ("data/samples_checksum", "train/learning_rate", "train/tokens"):
            assert split.curve(tag) == alone.curve(tag)
        for tag in ("train/loss", "train/grad_norm"):
            assert len(split.curve(tag)) == 20
            assert difference(split.curve(tag), alone.curve(tag)) < 1e-5, (processes, tag)


def test_every_stage_equals_a_plain_torch_loop(trained: Callable, short_data: Path, difference: Callable) -> None:
    """Loss, gradient norm before clipping, and after each of 4 steps weights and moments, at 2 processes and 3."""
    # Adam turns a gradient near its epsilon, which is all rounding, into an update of any size below the learning rate.
    settings = {"train.steps": 4, "train.warmup_steps": 0, "train.epsilon": 1e-4, "checkpoint.keep_last": 9}
    settings |= {"checkpoint.every_steps": 1, "train.clip_grad_norm": 0.5}
    losses, norms, states = None, None, None
    for stage, processes in [*((stage, 2) for stage in STAGES), (3, 3)]:
        run = trained(short_data, processes, **settings, **{"parallel.zero_stage": stage, "train.micro_batch_size": 2})
        if states is None:
            losses, norms, states = plain_loop(run.path.parents[1] / "config.yaml")
            assert min(norms) > 0.5, "nothing was clipped"
        assert difference(run.curve("train/loss"), losses) < 1e-5
        assert difference(run.curve("train/grad_norm"), norms) < 1e-5
        for step, expected in enumerate(states, start=1):
            found = run.tensors(step) | run.tensors(step, "optimizer")
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.allclose(found[name], tensor, atol=1e-6, rtol=1e-5), (stage, step, name)


def plain_loop(path: Path) -> tuple[list[float], list[float], list[dict[str, torch.Tensor]]]:
    """Losses, gradient norms, and weights and moments after each step, by torch alone on whole batches."""
    config = load_config(path)
    train = config.train
    model = Backbone(config.model)
    initialize(model, train.seed)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.endswith(("norm.weight", "theta"))]
    decayed = [p for p in matrices if p is not model.embedding.weight]
    others = [p for p in model.parameters() if not any(p is other for other in decayed)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=train.peak_lr, betas=(train.beta1, train.beta2), eps=train.epsilon,
    )  # fmt: skip
    stream = TrainStream(
        str(config.data.folder), train.global_batch_size, seed=train.seed,
        num_canonical_nodes=config.data.num_canonical_nodes, shuffle_block_size=config.data.shuffle_block_size,
    )  # fmt: skip
    losses, norms, states = [], [], []
    for step in range(train.steps):
        # Half a cosine from the peak at the first step to a tenth of it at the last.
        cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / (train.steps - 1), dtype=torch.float64)))
        for group in optimizer.param_groups:
            group["lr"] = float(train.peak_lr * (0.1 + 0.9 * cosine))
        batch = next(stream)
        loss = model(batch.tokens, batch.targets).sum() / (batch.targets != IGNORED_TARGET).sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad_norm)))
        optimizer.step()
        losses.append(loss.item())
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
        for kind in ("exp_avg", "exp_avg_sq"):
            state |= {f"{kind}/{name}": optimizer.state[p][kind].clone() for name, p in model.named_parameters()}
        states.append(state)
    stream.close()
    return losses, norms, states


def test_bf16_stays_within_a_percent_of_fp32_at_every_stage(
    trained: Callable, short_data: Path, difference: Callable
) -> None:
    settings = {"train.steps": 12, "train.micro_batch_size": 6}
    exact = trained(short_data, 1, **settings).curve("train/loss")
    for stage in STAGES:
        run = trained(short_data, 2, **settings, **{"parallel.zero_stage": stage, "train.precision": "bf16"})
        assert 0 < difference(run.curve("train/loss"), exact) < 0.01, stage
