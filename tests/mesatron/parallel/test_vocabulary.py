"""The loss of a vocabulary whose rows lie in a tensor group, in both forms, against that of a whole model in float64:
values, and gradients of hidden states and of every row.

Vocabularies of which the last process holds few words and of which it holds none; ignored targets, and one that is no
word.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mesatron_data.synthetic import write_shards

from mesatron.model import fused

SCRIPT = Path(__file__).with_name("vocabulary.py")
WIDTH, TOKENS, CAP = 24, (2, 11), 3.0


@pytest.mark.parametrize(("processes", "vocabulary"), [(2, 211), (3, 100), (3, 193)])
def test_loss(tmp_path: Path, odd_config: Callable, world: Callable, processes: int, vocabulary: int) -> None:
    if 0 < torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs, or none")
    draw = torch.Generator().manual_seed(vocabulary)
    weight = 2 * torch.randn(vocabulary, WIDTH, generator=draw)
    hidden, cotangent = torch.randn(*TOKENS, WIDTH, generator=draw), torch.rand(TOKENS, generator=draw)
    targets = torch.randint(vocabulary, TOKENS, generator=draw)
    targets[0, 4:7] = targets[1, -1] = -100
    targets[0, :2] = torch.tensor([0, vocabulary - 1])
    whole = {"weight": weight, "hidden": hidden, "targets": targets, "cotangent": cotangent}
    torch.save(whole, tmp_path / "whole.pt")

    shards = write_shards(tmp_path / "shards", vocabulary, TOKENS[1], {"train": 8, "validation": 2}, seed=5)
    sizes = {"model.width": WIDTH, "model.heads": 6, "model.head_dim": 4, "model.mlp_ratio": 2}
    config = odd_config(
        tmp_path / "config", shards, **sizes, **{"model.logit_cap": CAP, "parallel.tensor_size": processes}
    )
    outcome = world(processes, SCRIPT, config, tmp_path)
    assert outcome.exit_code == 0, outcome.errors

    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    exact = fused.linear_loss(leaves[0].flatten(0, 1), leaves[1], targets.flatten(), CAP, 1000, "torch").view(TOKENS)
    dhidden, dweight = torch.autograd.grad(exact, leaves, cotangent.double())
    seen = [torch.load(tmp_path / f"{rank}.pt") for rank in range(processes)]
    for form, dtype in seen[0]:
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        rows = torch.cat([process[form, dtype][2] for process in seen])
        assert not rows[vocabulary:].any()
        assert (rows[:vocabulary] - dweight).norm() <= tolerance * dweight.norm(), form
        for process in seen:
            losses, gradient, _, of_no_word = process[form, dtype]
            assert (losses[targets == -100] == 0).all()
            assert (losses - exact).norm() <= tolerance * exact.norm(), form
            assert (gradient - dhidden).norm() <= tolerance * dhidden.norm(), form
            assert of_no_word[:, 2].isnan().all()
            assert of_no_word.isnan().sum() == TOKENS[0]
