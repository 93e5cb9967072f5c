"""Figures derived from a loss."""

import math


def perplexity(loss: float) -> float:
    """exp(loss) of a loss in nats per token; infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
