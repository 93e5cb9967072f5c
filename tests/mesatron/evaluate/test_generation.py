"""Generation against the chunkwise forward run again on the whole growing text, and drawing against the probabilities
it should draw from."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from mesatron.config import ModelConfig
from mesatron.evaluate.generation import _choose, generate
from mesatron.model.backbone import Backbone
from mesatron.model.parameter import initialize

VOCABULARY = 40


@pytest.fixture(scope="module")
def model() -> Backbone:
    config = {
        "vocabulary_size": VOCABULARY, "width": 24, "layers": 2, "heads": 3, "head_dim": 8,
        "mesa": {"solver_tolerance": 1e-7, "chunk_size": 8},
    }  # fmt: skip
    model = Backbone(ModelConfig.model_validate(config))
    initialize(model, seed=0)
    with torch.no_grad():  # a tied embedding alone would repeat the last token
        model.embedding.weight.mul_(0.5)
        for block in model.blocks:
            block.mlp.down.weight.mul_(6)
            block.mixer.output.weight.mul_(6)
    return model


def losses_of_next(model: Backbone, tokens: Tensor) -> Tensor:
    """Loss of every possible next token after `tokens` [T], from the training forward pass."""
    texts = tokens.repeat(VOCABULARY, 1)
    targets = torch.full_like(texts, -100)
    targets[:, -1] = torch.arange(VOCABULARY)
    with torch.no_grad():
        return model(texts, targets)[:, -1]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 30])
def test_greedy_tokens_are_the_likeliest_of_the_forward_pass(model: Backbone, length: int) -> None:
    prompt = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
    produced = list(generate(model, prompt, 25))
    assert len(produced) == 25
    assert len(set(produced)) > 3, "a loop of one token would prove little"
    text = prompt
    for token in produced:
        losses = losses_of_next(model, text)
        assert losses.argmin() == token
        text = torch.cat([text, torch.tensor([token])])


def draws(logits: Tensor, temperature: float, top_p: float, count: int = 4000) -> Counter:
    generator = torch.Generator().manual_seed(0)
    return Counter(int(_choose(logits, temperature, top_p, generator)) for _ in range(count))


LOGITS = torch.tensor([0.5, 3.0, 0.0, 2.0, -1.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_drawn_shares_are_the_probabilities(temperature: float) -> None:
    counts = draws(LOGITS, temperature, 1.0)
    for token, probability in enumerate((LOGITS / temperature).softmax(-1).tolist()):
        deviation = (probability * (1 - probability) / 4000) ** 0.5
        assert counts[token] / 4000 == pytest.approx(probability, abs=4 * deviation)


def test_top_p_keeps_the_smallest_set_that_holds_it() -> None:
    """Probabilities in order: 0.659, 0.242, 0.054, 0.033, 0.012 (of tokens 1, 3, 0, 2, 4)."""
    for top_p, kept in {0.0: {1}, 0.6: {1}, 0.7: {1, 3}, 0.88: {1, 3}, 0.93: {1, 3, 0}, 1.0: {0, 1, 2, 3, 4}}.items():
        counts = draws(LOGITS, 1.0, top_p)
        assert set(counts) == kept
        kept_probability = LOGITS.softmax(-1)[list(kept)].sum()
        share = float(LOGITS.softmax(-1)[1] / kept_probability)
        assert counts[1] / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_tiny_temperature_takes_the_likeliest(temperature: float) -> None:
    assert set(draws(LOGITS, temperature, 1.0, count=20)) == {1}
    assert set(draws(30 * LOGITS, temperature, 0.5, count=20)) == {1}


def test_the_seed_decides(model: Backbone) -> None:
    prompt = torch.tensor([1, 2, 3])
    state = torch.get_rng_state()
    texts = [list(generate(model, prompt, 30, temperature=1.0, seed=seed)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)
