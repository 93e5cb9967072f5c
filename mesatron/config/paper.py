"""The paper's runs (arXiv 2506.05233, section G.4 and table 8) as one table, and the config files that follow from it.

`python -m mesatron.config.paper FOLDER` writes them into FOLDER, beside recipe.yaml, which holds what they share.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from mesatron.errors import ConfigError, report


class Size(NamedTuple):
    """Width, blocks and heads of a model."""

    width: int
    layers: int
    heads: int


SIZES = {"140m": Size(768, 14, 6), "440m": Size(1024, 28, 8), "1b": Size(1536, 28, 12)}
TOKENS_PER_STEP = 524_288
STEPS = {"15b": 28610, "50b": 95367}
"""Optimizer steps by the training tokens."""
RUNS = [(size, tokens) for size in SIZES for tokens in STEPS]
PEAK_LR = {
    "transformer": (2.5e-3, 3e-3, 1.5e-3, 1e-3, 2e-3, 8e-4),
    "mamba2": (3e-3, 1e-3, 2.5e-3, 1e-3, 2e-3, 9e-4),
    "gla": (2e-3, 1e-3, 2.5e-3, 9.5e-4, 2e-3, 8.5e-4),
    "mlstm": (2.5e-3, 1e-3, 3e-3, 9e-4, 1.5e-3, 8e-4),
    "deltanet": (3e-3, 1e-3, 3e-3, 8.5e-4, 1.5e-3, 8e-4),
    "gated_deltanet": (1e-3, 1e-3, 2.5e-3, 9.5e-4, 2e-3, 9e-4),
    "hawk": (2e-3, 1e-3, 2.5e-3, 9e-4, 2e-3, 9e-4),
    "hawk_mesa": (2.5e-3, 1e-3, 2e-3, 9e-4, 2e-3, 8.5e-4),
    "mesa": (3e-3, 9.5e-4, 2.5e-3, 1e-3, 2e-3, 8.5e-4),
    # The paper gives none for the layer without a forget gate; these are Mesa's.
    "mesa_rls": (3e-3, 9.5e-4, 2.5e-3, 1e-3, 2e-3, 8.5e-4),
    # Not scanned in the paper: 0.001 throughout.
    "swa-1024": (1e-3,) * 6,
}
"""Chosen peak learning rate of every mixer, in the order of RUNS."""


def run_name(mixer: str, size: str, tokens: str) -> str:
    """The name of a run and, with .yaml, of its file."""
    return f"{'mesanet' if mixer == 'mesa' else mixer.replace('_', '-')}-{size}-{tokens}"


def config_texts() -> dict[str, str]:
    """Every config file by its name."""
    texts = {}
    for mixer, rates in PEAK_LR.items():
        for (size, tokens), peak_lr in zip(RUNS, rates, strict=True):
            name, model = run_name(mixer, size, tokens), SIZES[size]
            mixer_line = "" if mixer == "mesa" else f"  mixer: {mixer}\n"
            texts[f"{name}.yaml"] = (
                f"base: recipe.yaml\nname: {name}\nmodel:\n{mixer_line}  width: {model.width}\n"
                f"  layers: {model.layers}\n  heads: {model.heads}\n"
                f"train:\n  steps: {STEPS[tokens]}\n  peak_lr: {f'{peak_lr:.1e}'.replace('e-0', 'e-')}\n"
            )
    return texts


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        report(ConfigError("Name the folder to write into, such as `python -m mesatron.config.paper configs/paper`."))
        sys.exit(ConfigError.exit_code)
    folder = Path(sys.argv[1])
    for name, text in config_texts().items():
        (folder / name).write_text(text)
