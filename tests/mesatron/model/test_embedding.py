"""The tied embedding against torch's unchunked cross entropy over explicitly capped logits: values and gradients, at
vocabulary 50257 and with chunks that do not divide the tokens."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.model.embedding import TiedEmbedding

WIDTH, CAP = 6, 3.0


def make_embedding(vocabulary: int, dtype: torch.dtype = torch.float64) -> TiedEmbedding:
    embedding = TiedEmbedding(vocabulary, WIDTH, CAP).to(dtype)
    with torch.no_grad():
        embedding.weight.copy_(torch.randn(vocabulary, WIDTH, generator=torch.Generator().manual_seed(0)))
    return embedding


def hidden_and_targets(vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 11, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (2, 11), generator=generator)
    targets[0, 4:7] = targets[1, -1] = -100
    return hidden.requires_grad_(), targets


@pytest.mark.parametrize("vocabulary", [13, 50257])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 21, 22, 1000])
def test_loss_per_token_and_its_gradients(vocabulary: int, chunk_tokens: int) -> None:
    embedding = make_embedding(vocabulary)
    hidden, targets = hidden_and_targets(vocabulary)
    losses = embedding(hidden, targets, chunk_tokens)
    logits = CAP * torch.tanh(hidden @ embedding.weight.T / CAP)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    assert (losses[targets == -100] == 0).all()
    assert (losses[targets != -100] > 0).all()

    weights = torch.linspace(0.5, 2, 22, dtype=torch.float64).view(2, 11)
    leaves = (hidden, embedding.weight)
    gradients = torch.autograd.grad((losses * weights).sum(), leaves)
    torch.testing.assert_close(
        gradients, torch.autograd.grad((expected * weights).sum(), leaves), rtol=1e-10, atol=1e-13
    )
    assert (gradients[0][targets == -100] == 0).all()


def test_ignored_targets_alone_give_zero_and_no_gradient() -> None:
    embedding = make_embedding(13)
    hidden, targets = hidden_and_targets(13)
    losses = embedding(hidden, torch.full_like(targets, -100), 4)
    gradients = torch.autograd.grad(losses.sum(), (hidden, embedding.weight))
    assert (losses == 0).all()
    assert all((gradient == 0).all() for gradient in gradients)


def test_logits_are_capped_smoothly_and_in_fp32() -> None:
    embedding = make_embedding(13)
    hidden = torch.randn(7, WIDTH, dtype=torch.float64) * torch.logspace(-3, 3, 7, dtype=torch.float64)[:, None]
    expected = CAP * torch.tanh(hidden @ embedding.weight.T / CAP)
    torch.testing.assert_close(embedding(hidden), expected, rtol=1e-12, atol=0)
    assert embedding(hidden).abs().max() <= CAP
    assert embedding.bfloat16()(hidden.bfloat16()).dtype == torch.float32


def test_embedded_tokens_are_rows_times_root_width() -> None:
    embedding = make_embedding(13)
    tokens = torch.tensor([[0, 12, 5], [5, 5, 1]])
    torch.testing.assert_close(embedding(tokens), embedding.weight[tokens] * WIDTH**0.5, rtol=1e-15, atol=0)
