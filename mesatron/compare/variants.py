"""The file of a comparison: one config, and what differs from it in each variant. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from mesatron.config import Config, accumulation_steps, as_override, changed_keys, data_parallel_size, load_config
from mesatron.config.load import first_error, read_mapping
from mesatron.config.schema import PositiveInt, Section
from mesatron.errors import ConfigError
from mesatron.train.run import FIXED_KEYS

USUAL_REFERENCE = "transformer"
OWN_KEYS = ("name", "runs_folder")
"""Keys that a comparison sets for each of its runs."""
SHARED_KEYS = (*FIXED_KEYS, "data.folder", "tokenizer.", "model.vocabulary_size", "train.steps")
"""Keys that decide data, its order and the budget."""


def _by_name(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    variants: dict[str, Any] = {}
    for entry in value:
        variant = {entry: {"model.mixer": entry}} if isinstance(entry, str) else entry
        if not isinstance(variant, dict) or len(variant) != 1 or variant.keys() & variants.keys():
            raise PydanticCustomError("mixers", "should be names of mixers or `name: overrides`, each name once")
        variants |= variant
    return variants


VariantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class ComparisonFile(Section):
    """What a comparison's file holds."""

    base: Path
    """Config file of all variants, relative to this file."""
    output: Path
    """Folder of everything that the comparison writes."""
    variants: Annotated[dict[VariantName, dict[str, Any]], BeforeValidator(_by_name), Field(min_length=1)]
    """Overrides by the variant's name, such as `gla: {model.mixer: gla, train.peak_lr: 2e-3}`; or a list of such and of
    names of mixers."""
    reference: str | None = None
    """The variant that losses by position are compared with; else `transformer` or, without one, the first."""
    processes: PositiveInt = 1
    """Processes of each training on this machine."""


@dataclass(frozen=True)
class Variant:
    """One run of a comparison: its resolved config, and the arguments by which `mesatron train` comes to the same."""

    name: str
    config: Config
    arguments: list[str]


@dataclass(frozen=True)
class Comparison:
    """Variants to be trained one after the other, in the file's order."""

    file: Path
    base: Path
    output: Path
    reference: str
    processes: int
    variants: list[Variant]

    @property
    def name(self) -> str:
        """The name of its folder, which heads its table and is that of its jobs."""
        return self.output.resolve().name


def load_comparison(file: Path, overrides: Sequence[str] = ()) -> Comparison:
    """The comparison in `file`; `overrides` of the base apply to every variant that does not set the same key.

    Raises ConfigError when the file or the config of a variant is wrong, and when variants would not be trained on
    the same data, in the same order, from the same seed and for as many steps.
    """
    try:
        found = ComparisonFile.model_validate(read_mapping(file))
    except ValidationError as error:
        raise ConfigError(f"{file}: {first_error(error, ComparisonFile)}") from None
    base = file.parent / found.base
    variants = [_variant(file, base, found, name, overrides) for name in found.variants]
    for variant in variants[1:]:
        for key, (first, own) in changed_keys(variants[0].config, variant.config).items():
            if key.startswith(SHARED_KEYS):
                raise ConfigError(
                    f"{file}: variant '{variant.name}' has {key} {own!r} and '{variants[0].name}' {first!r}, but all "
                    "must share data, seed and budget; set it in the base."
                )
    reference = found.reference or (USUAL_REFERENCE if USUAL_REFERENCE in found.variants else variants[0].name)
    if reference not in found.variants:
        raise ConfigError(f"{file}: reference '{reference}' is no variant; known are {', '.join(found.variants)}.")
    return Comparison(file, base, found.output, reference, found.processes, variants)


def _variant(file: Path, base: Path, found: ComparisonFile, name: str, overrides: Sequence[str]) -> Variant:
    own = found.variants[name]
    for key in OWN_KEYS:
        if key in own or any(override.startswith(f"{key}=") for override in overrides):
            raise ConfigError(f"{file}: {key} follows from `output` and the variant's name; remove it.")
    for key, value in own.items():
        if isinstance(value, dict):
            raise ConfigError(
                f"{file}: '{key}' of variant '{name}' is a section; write each of its keys in full, such as "
                "model.mixer: gla."
            )
    set_here = own | {"name": name, "runs_folder": str(found.output / "runs")}
    try:
        given = [as_override(key, value) for key, value in set_here.items()]
    except TypeError:
        raise ConfigError(f"{file}: a value of variant '{name}' is a date; put quotes around it.") from None
    arguments = [*overrides, *given]
    try:
        config = load_config(base, arguments)
        accumulation_steps(config, data_parallel_size(config, found.processes))
    except ConfigError as error:
        raise ConfigError(f"{file}, variant '{name}': {error}") from None
    return Variant(name, config, arguments)
