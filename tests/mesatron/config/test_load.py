"""Reading configs: inheritance, overrides and round trips against the values written; every kind of mistake, one wrong
letter in every shipped key among them, against the one line it should give."""

import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mesatron.config import Config, changed_keys, dump_config, load_config, load_stored_config
from mesatron.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
SHIPPED = sorted(path for path in CONFIGS.rglob("*.yaml") if "variants:" not in path.read_text())  # no comparisons
RUNS = [path for path in SHIPPED if path.name != "recipe.yaml"]


def message_of(path: Path, *overrides: str) -> str:
    """The error that loading gives; it must be one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path: Path, values: Any) -> Path:
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
    return path


def with_lines(folder: Path, text: str) -> Path:
    return write(folder / "config.yaml", f"{QUICKSTART.read_text()}{text}\n")


def key_places(values: dict[str, Any], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*parents, key)
        if isinstance(value, dict):
            yield from key_places(value, (*parents, key))


def misspellings(word: str, draw: random.Random) -> Iterator[str]:
    """`word` with each letter in turn left out, swapped with the next and replaced by another."""
    for index in range(len(word)):
        yield word[:index] + word[index + 1 :]
        yield word[:index] + word[index + 1 : index + 2] + word[index] + word[index + 2 :]
        yield word[:index] + draw.choice(string.ascii_lowercase) + word[index + 1 :]


def renamed(values: dict[str, Any], place: tuple[str, ...], new: str) -> dict[str, Any]:
    first, *rest = place
    if rest:
        return {**values, first: renamed(values[first], tuple(rest), new)}
    return {new if key == first else key: value for key, value in values.items()}


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda path: path.stem)
def test_a_wrong_letter_in_any_key_is_found_and_the_right_key_suggested(tmp_path: Path, shipped: Path) -> None:
    draw = random.Random(0)
    values = yaml.safe_load(shipped.read_text())
    inherited = {"base": str(shipped.parent / values["base"])} if "base" in values else {}
    path = tmp_path / "config.yaml"
    tried = suggested = 0
    for place in key_places(values):
        for wrong in misspellings(place[-1], draw):
            siblings = {other[-1] for other in key_places(values) if other[:-1] == place[:-1]}
            if wrong in siblings:  # nothing was changed, or beta1 became beta2
                continue
            # The sections without the mistake add nothing but time.
            section = renamed({place[0]: values[place[0]]}, place, wrong)
            message = message_of(write(path, section if place == ("base",) else inherited | section))
            assert f"'{'.'.join([*place[:-1], wrong])}'" in message
            tried += 1
            suggested += f"did you mean '{'.'.join(place)}'?" in message
    assert tried > 50
    assert suggested >= 0.95 * tried


def test_a_key_in_the_wrong_section_is_sent_to_its_own() -> None:
    assert "did you mean 'train.peak_lr'?" in message_of(QUICKSTART, "peak_lr=1e-3")
    assert "did you mean 'model.mesa.gamma_cap'?" in message_of(QUICKSTART, "model.gamma_cap=1")
    assert "did you mean 'model.mesa'?" in message_of(QUICKSTART, "mesa.gamma_cap=1")


def test_an_unlike_key_gets_the_list_of_known_ones() -> None:
    known = "tensor_size, sequence_parallel, context_size, pipeline_size, data_size, zero_stage, offload_optimizer."
    assert message_of(QUICKSTART, "parallel.qqqq=1").endswith(f"unknown key 'parallel.qqqq'; known here: {known}")


def test_files_inherit_key_by_key_and_the_nearest_wins(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep/first.yaml", {"base": str(QUICKSTART), "train": {"steps": 111, "beta1": 0.8}})
    write(tmp_path / "second.yaml", {"base": "deep/first.yaml", "train": {"steps": 222, "warmup_steps": 5}})
    last = write(tmp_path / "last.yaml", {"base": "second.yaml", "train": {"warmup_steps": 6}, "name": "last"})
    config = load_config(last, ["train.warmup_steps=7"])
    original = load_config(QUICKSTART)
    assert changed_keys(original, config) == {
        "name": ("quickstart", "last"), "train.steps": (300, 222), "train.beta1": (0.9, 0.8),
        "train.warmup_steps": (30, 7),
    }  # fmt: skip


def test_the_weights_of_a_mixture_are_inherited_or_replaced_as_a_whole(tmp_path: Path) -> None:
    """A source that is left out is not read, in a file as on the command line."""
    first = {"base": str(QUICKSTART), "data": {"weights": {"A": 1, "B": 1}}}
    write(tmp_path / "first.yaml", first)
    same = write(tmp_path / "same.yaml", {"base": "first.yaml", "data": {"context_length": 256}})
    assert load_config(same).data.weights == {"A": 1, "B": 1}
    other = write(tmp_path / "other.yaml", {"base": "first.yaml", "data": {"weights": {"A": 2}}})
    assert load_config(other).data.weights == load_config(same, ["data.weights={A: 2}"]).data.weights == {"A": 2}


def test_a_run_of_before_a_check_can_be_read(tmp_path: Path) -> None:
    values = yaml.safe_load(dump_config(load_config(QUICKSTART)))
    stored = write(tmp_path / "config.yaml", values | {"checkpoint": {"every_steps": 30, "keep_every_steps": 100}})
    assert "checkpoint.keep_every_steps must be a multiple" in message_of(stored)
    assert load_stored_config(stored).checkpoint.keep_every_steps == 100


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_cycle_of_base_files_is_named(tmp_path: Path, length: int) -> None:
    for number in range(length):
        write(tmp_path / f"{number}.yaml", {"base": f"{(number + 1) % length}.yaml"})
    assert "leads back to itself" in message_of(tmp_path / "0.yaml")


def test_two_files_may_share_a_base_file(tmp_path: Path) -> None:
    """Not a cycle: the same folder reached by another spelling of its path."""
    (tmp_path / "a").mkdir()
    first = write(tmp_path / "a/first.yaml", {"base": str(QUICKSTART)})
    assert load_config(write(tmp_path / "second.yaml", {"base": "a/../a/first.yaml"})) == load_config(first)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base: nowhere.yaml", "nowhere.yaml: No such file or directory"),
        ("base: [quickstart.yaml]", "`base` must be the path of one config file, not ['quickstart.yaml']"),
        ("base: .", "Is a directory"),
        ("name: again", "key 'name' stands twice"),
        ("parallel: {zero_stage: 1, zero_stage: 2}", "key 'zero_stage' stands twice"),
        ("parallel: {zero_stage: 1", "not valid YAML"),
        ("\tparallel: 1", "not valid YAML"),
        ("? [a, b]\n: 1", "found unhashable key"),
        ("released: 2020-13-45", "month must be in 1..12"),
        ("parallel: !!python/object:os.system {}", "not valid YAML"),
        ("1: 2", "'1' is 1, but keys should be strings"),
        ("parallel:", "'parallel' is None, but should be a section of keys"),
        ("parallel: 2", "'parallel' is 2, but should be a section of keys"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in message_of(with_lines(tmp_path, text)).replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("text", "expected"), [("", "holds no keys"), ("- a", "holds no keys"), ("a", "holds no keys")]
)
def test_files_that_are_no_mapping(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in message_of(write(tmp_path / "config.yaml", text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in message_of(tmp_path / "none.yaml")
    assert "Is a directory" in message_of(tmp_path)
    assert "Not a directory" in message_of(write(tmp_path / "a.yaml", "") / "b.yaml")
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9".encode("latin-1"))
    assert "not UTF-8" in message_of(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=many", "'train.steps' is 'many', but should be a valid integer"),
        ("train.steps=1.5", "'train.steps' is 1.5"),
        ("train.steps=1e3", "'train.steps' is '1e3'"),
        ("train.steps=yes", "'train.steps' is True, but should not be a truth value"),
        ("train.peak_lr=true", "'train.peak_lr' is True, but should not be a truth value"),
        ("parallel.zero_stage=on", "'parallel.zero_stage' is True, but should not be a truth value"),
        ("name=no", "'name' is False, but should not be a truth value"),
        ("data.shuffle=maybe", "'data.shuffle' is 'maybe'"),
        ("train.steps=", "'train.steps' is None"),
        ("train.steps=[1]", "'train.steps' is [1]"),
        ("data.folder=3", "'data.folder' is 3, but should be a path"),
        ("name=5", "'name' is 5, but should be a valid string"),
        ("name=../up", "'name' is '../up'"),
        ("train.steps=0", "'train.steps' is 0, but should be greater than 0"),
        ("train.seed=-1", "'train.seed' is -1"),
        ("train.beta1=1", "'train.beta1' is 1, but should be less than 1"),
        ("train.final_lr_fraction=1.01", "'train.final_lr_fraction' is 1.01"),
        ("train.peak_lr=.nan", "'train.peak_lr' is nan, but should be a finite number"),
        ("train.peak_lr=inf", "'train.peak_lr' is 'inf', but should be a finite number"),
        ("model.mesa.gamma_cap=1.1", "'model.mesa.gamma_cap' is 1.1"),
        ("model.mesa.solver_tolerance=1", "'model.mesa.solver_tolerance' is 1"),
        ("parallel.zero_stage=4", "should be 0, 1, 2 or 3"),
        ("train.schedule=linear", "should be 'cosine' or 'wsd'"),
        ("model.mixer=mamba", "'model.mixer' is 'mamba', but 'mamba' is no mixer; did you mean 'mamba2'?"),
        ("model.mixer=[mesa, swa-12x]", "'swa-12x' is no mixer; in swa-N, N is a whole number from 1 to"),
        ("model.mixer=swa-0", "'swa-0' is no mixer; in swa-N, N is a whole number from 1 to"),
        ("model.mixer=swa_256", "'swa_256' is no mixer; did you mean 'swa-256'?"),
        ("model.mixer='{x}'", "'{x}' is no mixer; known are"),
        ("base=quickstart.yaml", "unknown key 'base'; `base` stands in the file only."),
        ("model.mixer=s4", "'s4' is no mixer; known are mesa, transformer, swa, gla"),
        ("model.mixer=[]", "should name at least one mixer"),
        ("model.mixer=[3]", "should be the name of a mixer or a list of names"),
        ("model.mlstm.implementation=fla", "should be 'auto', 'reference' or 'torch'"),
        ("model.mesa_rls.implementation=fla", "should be 'auto', 'reference', 'torch' or 'triton'"),
        ("model.gla.gamma_cap=0.9", "did you mean 'model.mesa.gamma_cap'?"),
        ("train", "Override 'train' is not of the form section.key=value"),
        ("=3", "Override '=3' is not of the form section.key=value"),
        ("train.peak_lr.x=3", "'peak_lr' is a value, not a section"),
        ("train.peak_lr={a", "not valid YAML"),
        ("data.folder=shards #2", "a comment begins at ' #'; put quotes around the value"),
        ("data.folder=gr\udcf6n", "the value has bytes that are no text; leave them out, or set a locale"),
        ("train={steps: 1, steps: 2}", "not valid YAML"),
        ("train.peak_lrr=1", "did you mean 'train.peak_lr'?"),
        ("train.={}", "unknown key 'train.'"),
        ("train={}", "key 'train.steps' is missing"),
    ],
)
def test_mistakes_in_an_override(override: str, expected: str) -> None:
    assert expected in message_of(QUICKSTART, override)


def test_overrides_apply_in_order_and_parse_as_yaml() -> None:
    config = load_config(
        QUICKSTART,
        ["train.peak_lr=3e-3", "train.peak_lr=2e-3", "data.shuffle=false", "name='007'", "checkpoint={keep_last: 9}"],
    )
    assert (config.train.peak_lr, config.data.shuffle, config.name) == (2e-3, False, "007")
    assert (config.checkpoint.keep_last, config.checkpoint.every_steps) == (9, 1000)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_shipped_configs_survive_a_round_trip(tmp_path: Path, path: Path) -> None:
    config = load_config(path)
    assert load_config(write(tmp_path / "resolved.yaml", dump_config(config))) == config


@settings(max_examples=60, deadline=None)
@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True),
    folder=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).map(lambda text: f"x{text}"),
    peak_lr=st.floats(1e-6, 1e30),
    epsilon=st.floats(0, exclude_min=True, allow_infinity=False),
)
def test_any_values_survive_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, name: str, folder: str, peak_lr: float, epsilon: float
) -> None:
    """Names such as 1e5, no and 0x10, and paths with quotes, colons and line feeds included."""
    values = load_config(QUICKSTART).model_dump(mode="json")
    values["name"], values["data"]["folder"] = name, folder
    values["train"] |= {"peak_lr": peak_lr, "epsilon": epsilon}
    config = Config.model_validate(values)
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config
    assert changed_keys(config, load_config(path)) == {}
