"""Files of comparisons: what each variant becomes, and the one line for every mistake."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesatron.compare.variants import load_comparison
from mesatron.config import load_config
from mesatron.errors import ConfigError

COARSE = {"model.mesa.solver_steps": 1}


@pytest.fixture
def write(tmp_path: Path, tiny_config: Callable[..., Path]) -> Callable[..., Path]:
    """`write(**changes)`: a comparison of two variants beside its base."""
    tiny_config(tmp_path)

    def write(**changes: Any) -> Path:
        values = {"base": "config.yaml", "output": str(tmp_path / "out"), "variants": {"fine": {}, "coarse": COARSE}}
        path = tmp_path / "comparison.yaml"
        path.write_text(yaml.safe_dump(values | changes, sort_keys=False))
        return path

    return write


def test_variants_are_the_base_with_their_overrides(write: Callable[..., Path], tmp_path: Path) -> None:
    comparison = load_comparison(write(), ["train.steps=5"])
    fine, coarse = comparison.variants
    assert (comparison.reference, comparison.processes) == ("fine", 1)
    assert [variant.config.run_folder for variant in (fine, coarse)] == [
        tmp_path / "out/runs" / v for v in ("fine", "coarse")
    ]
    assert [variant.config.model.mesa.solver_steps for variant in (fine, coarse)] == [30, 1]
    for variant in comparison.variants:
        assert variant.config.train.steps == 5
        assert load_config(comparison.base, variant.arguments) == variant.config


def test_a_list_names_mixers(write: Callable[..., Path]) -> None:
    variants = load_comparison(write(variants=["gla", "swa-4"])).variants
    assert [(variant.name, variant.config.model.mixer) for variant in variants] == [("gla", "gla"), ("swa-4", "swa-4")]


def test_a_list_also_takes_overrides(write: Callable[..., Path]) -> None:
    first, coarse = load_comparison(write(variants=["mesa", {"coarse": COARSE}])).variants
    assert (first.name, first.config.model.mesa.solver_steps) == ("mesa", 30)
    assert (coarse.name, coarse.config.model.mesa.solver_steps) == ("coarse", 1)


def test_names_and_values_mean_what_they_say(write: Callable[..., Path], tmp_path: Path) -> None:
    """Whatever YAML would make of them."""
    names, output = ["5", "1.5", "no", "null", "2024-01-01"], tmp_path / "my runs #2: \u00e9 \U0001f600"
    text = "#1: \U0001f600"
    comparison = load_comparison(write(output=str(output), variants={name: {"tokenizer.path": text} for name in names}))
    assert [variant.config.run_folder for variant in comparison.variants] == [output / "runs" / name for name in names]
    assert [str(variant.config.tokenizer.path) for variant in comparison.variants] == [text] * len(names)
    assert comparison.name == output.name


def test_a_folder_named_by_dots_has_its_own_name(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_comparison(write(output=".")).name == tmp_path.name


def test_the_transformer_is_the_usual_reference(write: Callable[..., Path]) -> None:
    variants = {"fine": {}, "transformer": {}}
    assert load_comparison(write(variants=variants)).reference == "transformer"
    assert load_comparison(write(variants=variants, reference="fine")).reference == "fine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": {}}, "unknown key 'variant'; did you mean 'variants'"),
        ({"base": "nowhere.yaml"}, "variant 'fine': Cannot read the config .*nowhere.yaml: No such file"),
        ({"output": None}, "'output' is None, but should be a path"),
        ({"processes": 0}, "'processes' is 0"),
        ({"processes": 3}, "variant 'fine': .*8 is no multiple of 2 x 3 = 6"),
        ({"variants": {}}, "'variants' is {}"),
        ({"variants": ["mesa", "mesa"]}, "should be names of mixers or `name: overrides`, each name once"),
        ({"variants": ["mesa", 3]}, "should be names of mixers or `name: overrides`, each name once"),
        ({"variants": ["mesa", {"mesa": {}}]}, "should be names of mixers or `name: overrides`, each name once"),
        ({"variants": [{"a": {}, "b": {}}]}, "should be names of mixers or `name: overrides`, each name once"),
        ({"variants": ["mesa", {"a": 1}]}, "'variants.a' is 1, but should be a section of keys"),
        ({"variants": ["mesas"]}, "variant 'mesas': .*'model.mixer' is 'mesas'"),
        ({"variants": {"a": 1}}, "'variants.a' is 1, but should be a section of keys"),
        ({"variants": {"../a": {}}}, "is '../a', but string should match"),
        ({"variants": {"a": {"train.peak_lrr": 1}}}, "variant 'a': .*did you mean 'train.peak_lr'"),
        ({"variants": {"a": {"train.peak_lr": None}}}, "variant 'a': .*'train.peak_lr' is None"),
        (
            {"variants": {"a": {"model": {"mixer": "gla"}}}},
            "'model' of variant 'a' is a section; write each of its keys",
        ),
        ({"variants": {"a": {"name": "b"}}}, "name follows from `output`"),
        ({"variants": {"a": {}, "b": {"train.steps": 7}}}, "'b' has train.steps 7 and 'a' 6, but all must share"),
        ({"variants": {"a": {}, "b": {"train.seed": 7}}}, "'b' has train.seed 7 and 'a' 0, but all must share"),
        ({"reference": "gla"}, "reference 'gla' is no variant; known are fine, coarse"),
    ],
)
def test_mistakes_are_named(write: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load_comparison(write(**changes))
    assert "\n" not in str(raised.value)


def test_the_runs_names_cannot_be_overridden(write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="runs_folder follows from `output`"):
        load_comparison(write(), ["runs_folder=elsewhere"])
