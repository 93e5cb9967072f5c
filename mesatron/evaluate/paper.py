"""What the paper measured (arXiv 2506.05233, table 10), to stand beside our own figures. Free of torch."""

from __future__ import annotations

from typing import Any

from mesatron.config import Config, ModelConfig
from mesatron.config.mixers import SECTIONS
from mesatron.config.paper import SIZES, STEPS, TOKENS_PER_STEP

CONTEXT_LENGTH, VOCABULARY_SIZE = 2048, 50257
PERPLEXITIES: dict[tuple[str, str], dict[str, float]] = {
    ("140m", "15b"): {
        "hawk": 19.73, "mamba2": 18.29, "gla": 17.37, "mlstm": 17.35, "deltanet": 17.26, "gated_deltanet": 17.12,
        "mesa": 17.02, "hawk_mesa": 16.81, "transformer": 16.95,
    },
    ("440m", "15b"): {
        "hawk": 14.40, "mamba2": 14.45, "gla": 13.69, "mlstm": 13.71, "deltanet": 13.80, "gated_deltanet": 13.48,
        "mesa": 13.44, "hawk_mesa": 13.37, "swa-4": 23.36, "swa-64": 15.98, "swa-256": 14.69, "swa-1024": 13.95,
        "transformer": 13.64,
    },
    ("1b", "15b"): {
        "hawk": 12.71, "mamba2": 12.78, "gla": 12.28, "mlstm": 12.38, "deltanet": 12.23, "gated_deltanet": 12.06,
        "mesa": 12.02, "hawk_mesa": 11.91, "swa-4": 20.27, "swa-64": 14.08, "swa-256": 12.98, "swa-1024": 12.33,
        "transformer": 12.16,
    },
    ("140m", "50b"): {
        "hawk": 18.34, "mamba2": 17.05, "gla": 16.30, "mlstm": 16.20, "deltanet": 16.17, "gated_deltanet": 16.05,
        "mesa": 16.05, "hawk_mesa": 15.82, "transformer": 15.81,
    },
    ("440m", "50b"): {
        "hawk": 12.87, "mamba2": 13.07, "gla": 12.61, "mlstm": 12.56, "deltanet": 12.59, "gated_deltanet": 12.44,
        "mesa": 12.34, "hawk_mesa": 12.30, "swa-4": 19.32, "swa-64": 14.04, "swa-256": 13.23, "swa-1024": 12.52,
        "transformer": 12.40,
    },
    ("1b", "50b"): {
        "hawk": 11.24, "mamba2": 11.39, "gla": 10.99, "mlstm": 11.01, "deltanet": 11.01, "gated_deltanet": 10.89,
        "mesa": 10.83, "hawk_mesa": 10.78, "swa-4": 16.46, "swa-64": 12.37, "swa-256": 11.60, "swa-1024": 11.00,
        "transformer": 10.86,
    },
}  # fmt: skip
"""Perplexity on held-out SlimPajama, by size and training tokens and by mixer."""


def paper_perplexity(config: Config) -> float | None:
    """The paper's perplexity on held-out SlimPajama of a run like this one; None if it has none.

    Alike are the model, whatever its kernels, the context and, within 1 %, the tokens trained on. The paper's models
    are those of mesatron.config.paper, with the defaults of the config.
    """
    if config.data.context_length != CONTEXT_LENGTH:
        return None
    own, tokens = _function(config.model), config.train.steps * config.tokens_per_step
    for (size, budget), perplexities in PERPLEXITIES.items():
        if abs(tokens / (STEPS[budget] * TOKENS_PER_STEP) - 1) < 0.01:
            for mixer, perplexity in perplexities.items():
                model = ModelConfig(vocabulary_size=VOCABULARY_SIZE, mixer=mixer, **SIZES[size]._asdict())
                if _function(model) == own:
                    return perplexity
    return None


def _function(model: ModelConfig) -> dict[str, Any]:
    """What decides the function that a model computes: no kernels, nor settings of mixers that it has not."""
    mixers = [model.mixer_of(layer) for layer in range(model.layers)]
    layers = [(mixer.name, mixer.window or model.swa.window) if mixer.name == "swa" else mixer.name for mixer in mixers]
    no_function = {"implementation", "chunk_size", "window"}
    settings = {name: getattr(model, name).model_dump(exclude=no_function) for name in model.used_mixers}
    return model.model_dump(exclude={"mixer", "implementation", *SECTIONS}) | settings | {"mixers": layers}
