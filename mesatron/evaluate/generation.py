"""Continue a prompt, with a state whose size does not grow with the text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mesatron.model.backbone import Backbone


@torch.inference_mode()
def generate(
    model: Backbone, prompt: Tensor, max_new_tokens: int, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Yield the tokens that follow `prompt` int64 [T], one at a time.

    The prompt is read by the chunkwise form, each new token by one step of the recurrence. `temperature` 0 takes the
    likeliest token; otherwise tokens are drawn, from the smallest set that holds `top_p` of the probability.
    """
    generator = torch.Generator(device=prompt.device).manual_seed(seed)
    tokens, states = prompt[None], None
    for _ in range(max_new_tokens):
        logits, states = model.decode(tokens, states)
        tokens = _choose(logits[0], temperature, top_p, generator).view(1, 1)
        yield int(tokens)


def _choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """One token id [1] from fp32 logits [vocabulary]."""
    if temperature == 0:
        return logits.argmax()
    # Relative to the likeliest and in float64, so that a temperature near 0 gives no inf - inf.
    scaled = (logits - logits.max()).double() / temperature
    probabilities, ids = scaled.softmax(-1).sort(descending=True)
    outside = probabilities.cumsum(-1) - probabilities >= top_p
    outside[0] = False  # with top_p 0 the likeliest token stays
    return ids[torch.multinomial(probabilities.masked_fill(outside, 0.0), 1, generator=generator)]
