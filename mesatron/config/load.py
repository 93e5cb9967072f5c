"""Reading a config: defaults, then the `base:` files, then the file, then dotted overrides, then checks."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from pydantic import BaseModel, ValidationError

from mesatron.config.checks import check
from mesatron.config.schema import Config
from mesatron.errors import ConfigError, refused_path


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML lets the last of two equal keys win in silence; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """The resolved config of `path` with dotted `overrides` such as `train.peak_lr=3e-3`.

    Raises ConfigError, in one sentence, for an unreadable file, an unknown key (naming the nearest known one), a
    value of the wrong kind or out of range, and fields that do not fit together.
    """
    config = _resolve(path, overrides)
    check(config, path)
    return config


def load_stored_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """The config that a run wrote into its folder or a checkpoint, as that was trained but for `overrides`.

    Fields that an earlier version let pass together do no harm to what reads it. Otherwise raises as `load_config`.
    """
    return _resolve(path, overrides)


def _resolve(path: Path, overrides: Iterable[str]) -> Config:
    values = _read(path, ())
    for override in overrides:
        _apply_override(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_error(error)}") from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def as_override(key: str, value: Any) -> str:
    """What sets `key` to a value of YAML, of whatever letters it is. Raises TypeError for dates."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def changed_keys(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    return {
        key: (before.get(key), after.get(key))
        for key in {**before, **after}
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    }


_ABSENT = object()


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def read_mapping(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file. Raises ConfigError when it cannot be read or holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise refused_path(error, f"Cannot read the config {path}: {error.strerror}", "check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"Cannot read the config {path}: it is not UTF-8 text; check the path.") from None
    try:
        values = yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no keys; a config is a mapping of sections, see configs/quickstart.yaml.")
    return values


def _read(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in children:
        raise ConfigError(f"{path}: its chain of `base:` files leads back to itself; remove one of them.")
    values = read_mapping(path)
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError(f"{path}: `base` must be the path of one config file, not {base!r}.")
    return _merge(_read(path.parent / base, (*children, path.resolve())), values, Config)


def _merge(base: dict[str, Any], top: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """Key by key in `section` and those below; a value that is a mapping itself, such as data.weights, is one value."""
    merged = dict(base)
    for key, value in top.items():
        kind = section.model_fields[key].annotation if key in section.model_fields else None
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value, kind) if both and _is_section(kind) else value
    return merged


def _is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"Override '{override}' is not of the form section.key=value, such as train.peak_lr=3e-3.")
    try:
        value = yaml.load(text, _UniqueKeyLoader)
    except yaml.reader.ReaderError:
        raise ConfigError(
            f"Override '{override}': the value has bytes that are no text; leave them out, or set a locale that has "
            "them, such as LC_ALL=C.UTF-8."
        ) from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"Override '{override}': the value is not valid YAML; put quotes around it.") from None
    if text.count("#") != str(value).count("#"):
        raise ConfigError(f"Override '{override}': a comment begins at ' #'; put quotes around the value.")
    section = values
    *parents, last = key.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(f"Override '{override}': '{parent}' is a value, not a section.")
    section[last] = value


# Where pydantic's own words name Python classes.
_MESSAGES = {
    "model_type": "should be a section of keys", "dict_type": "should be a section of keys",
    "path_type": "should be a path",
}  # fmt: skip


def first_error(error: ValidationError, schema: type[BaseModel] = Config) -> str:
    """What is wrong with values for `schema`, in one sentence without the file's name."""
    details = error.errors(include_url=False)
    # A misspelt required key gives two errors; the unknown key is the one to show.
    detail = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    location = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key '{location}'; {_suggestion(detail['loc'], schema)}"
    if detail["type"] == "missing":
        return f"key '{location}' is missing; set it in the file or as an override."
    message = _MESSAGES.get(detail["type"]) or detail["msg"][0].lower() + detail["msg"][1:]
    end = "" if message.endswith("?") else "."
    return f"'{location}' is {detail['input']!r}, but {message.removeprefix('input ')}{end}"


def _suggestion(location: tuple[str | int, ...], schema: type[BaseModel]) -> str:
    *parents, wrong = [str(part) for part in location]
    section = schema
    for parent in parents:
        section = section.model_fields[parent].annotation  # type: ignore[assignment]
    here = {name: ".".join([*parents, name]) for name in section.model_fields}
    if not parents:
        if wrong == "base":
            return "`base` stands in the file only."
        here["base"] = "base"
    everywhere = {key.rpartition(".")[2]: key for key in reversed(_all_keys(schema))}
    for known, likeness in ((here, 0.7), (everywhere, 0.7), (here, 0.5)):
        near = difflib.get_close_matches(wrong, known, n=1, cutoff=likeness)
        if near:
            return f"did you mean '{known[near[0]]}'?"
    return f"known here: {', '.join(section.model_fields)}."


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys
