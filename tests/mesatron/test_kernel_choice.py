"""What a run's kernels are decided to be, by the config and what the self-check is known to have found."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mesatron_kernels import Choice
from mesatron_kernels.selfcheck import PairCheck

from mesatron.config import load_config
from mesatron.errors import ConfigError
from mesatron.kernel_choice import choose_kernels, with_kernels
from mesatron.model.recurrences.fla_core import CONTINUED_DELTA, known_fault, refusal

selfcheck = importlib.import_module("mesatron_kernels.selfcheck")


def test_without_a_gpu(tmp_path: Path, tiny_config: Callable[..., Path]) -> None:
    config = load_config(tiny_config(tmp_path))
    assert choose_kernels(config, torch.device("cpu")) == {"mesa": ("torch", "no GPU")}
    named = with_kernels(config, {"mesa": Choice("reference", "")})
    assert choose_kernels(named, torch.device("cpu")) == {"mesa": ("reference", "as asked")}
    assert with_kernels(named, {"mesa": Choice("auto", "")}) == config
    with pytest.raises(ConfigError, match="needs a GPU"):
        choose_kernels(with_kernels(config, {"mesa": Choice("triton", "")}), torch.device("cpu"))


def test_mixers_with_kernels_of_fla_core_need_a_gpu(tmp_path: Path, tiny_config: Callable[..., Path]) -> None:
    config = load_config(tiny_config(tmp_path), ["model.mixer=[gla, hawk, mesa]", "model.layers=4"])
    cpu = torch.device("cpu")
    assert choose_kernels(config, cpu) == dict.fromkeys(("gla", "hawk", "mesa"), ("torch", "no GPU"))
    for mixer in ("gla", "hawk", "mesa"):
        named = load_config(tiny_config(tmp_path), [f"model.mixer={mixer}", f"model.{mixer}.implementation=fla"])
        with pytest.raises(ConfigError, match=f"model.{mixer}.implementation is fla, which cannot be used: no GPU"):
            choose_kernels(named, cpu)
    unused = load_config(tiny_config(tmp_path), ["model.gla.implementation=fla"])
    assert choose_kernels(unused, cpu) == {"mesa": ("torch", "no GPU")}


def test_flex_attention_where_it_runs_and_else_sdpa(tmp_path: Path, tiny_config: Callable[..., Path]) -> None:
    def chosen(name: str, head_dim: int, device: str) -> Choice:
        settings = ["model.mixer=swa-8", f"model.swa.implementation={name}"]
        sizes = [f"model.head_dim={head_dim}", f"model.width={2 * head_dim}"]
        return choose_kernels(load_config(tiny_config(tmp_path), [*settings, *sizes]), torch.device(device))["swa"]

    assert chosen("auto", 32, "cpu") == ("torch", "no GPU")
    assert chosen("auto", 32, "cuda:0") == ("flex", "for documents and windows")
    assert chosen("auto", 24, "cuda:0") == ("torch", "FlexAttention has heads of multiples of 16, not 24")
    assert chosen("torch", 32, "cuda:0") == ("torch", "as asked")
    with pytest.raises(
        ConfigError, match=r"model.swa.implementation is flex, which cannot be used: no GPU; choose torch"
    ):
        chosen("flex", 32, "cpu")


@pytest.mark.parametrize(
    ("triton", "kernel", "capability", "miscompiled"),
    [
        ("3.6.0", "simple_gla", 9, True), ("3.7.0", "gated_delta_rule", 9, True), ("3.7.0rc1", "simple_gla", 9, True),
        ("3.4.0rc1", "simple_gla", 9, True), ("3.6.0+git1234", "simple_gla", 9, True),
        ("3.3.1", "simple_gla", 9, False), ("3.7.1", "simple_gla", 9, False), ("3.6.0", "delta_rule", 9, False),
        ("3.6.0", CONTINUED_DELTA, 9, True), ("3.6.0", "simple_gla", 8, False), ("3.10.0", "simple_gla", 9, False),
    ],
)  # fmt: skip
def test_kernels_that_triton_miscompiles(triton: str, kernel: str, capability: int, miscompiled: bool) -> None:
    found = known_fault(kernel, torch.bfloat16, "0.6.0", triton, capability)
    assert found == (f"Triton {triton} miscompiles fla-core's {kernel} on Hopper" if miscompiled else None)


def test_runs_of_a_sequence_go_on_from_a_state(
    tmp_path: Path, tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("mesatron.kernel_choice.refusal", lambda kernel, dtype, device: asked.append(kernel))
    for size, documents in ((1, False), (1, True), (2, False), (2, True)):
        settings = ["model.mixer=deltanet", "train.precision=bf16", f"parallel.context_size={size}"]
        settings += [f"data.reset_state_at_documents={str(documents).lower()}"]
        choose_kernels(load_config(tiny_config(tmp_path), settings), torch.device("cuda", 0))
    assert asked == ["delta_rule", "delta_rule", CONTINUED_DELTA, "gated_delta_rule"]


def test_kernels_that_fla_core_does_not_have() -> None:
    assert known_fault("simple_gla", torch.float32, "0.6.0", "3.7.1", 9) == "fla-core's simple_gla has no float32"
    assert known_fault("mesa_net", torch.float32, "0.6.0", "3.7.1", 9) == "fla-core's mesa_net has no float32"
    assert known_fault("mesa_net", torch.bfloat16, "0.6.0", "3.6.0", 9) is None
    assert known_fault("hgrn", torch.float32, "0.6.1.dev0", "3.6.0", 9) is None
    for version in ("0.5.1", "0.6.0rc1"):
        reason = f"fla-core is {version}, but 0.6 or later is needed"
        assert known_fault("hgrn", torch.float32, version, "3.6.0", 9) == reason


def test_the_peer_s_mesa_kernel_is_taken_only_by_name_and_for_its_head_sizes(
    tmp_path: Path, tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU where fla-core has no known fault."""
    monkeypatch.setattr("mesatron.kernel_choice.refusal", lambda kernel, dtype, device: None)
    gpu = torch.device("cuda", 0)
    fits, large = (
        load_config(
            tiny_config(tmp_path), ["model.mesa.implementation=fla", f"model.head_dim={D}", f"model.width={2 * D}"]
        )
        for D in (128, 144)
    )
    chosen = ("fla", "the peer's kernel, for comparison: it loses small gradients")
    assert choose_kernels(fits, gpu) == {"mesa": chosen}
    with pytest.raises(
        ConfigError, match=r"cannot be used: fla-core's mesa_net has heads of 128 at most, not 144; choo"
    ):
        choose_kernels(large, gpu)


def test_fla_core_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    assert refusal("hgrn", torch.float32, gpu) == "fla-core is not installed"
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla/__init__.py").write_text("raise RuntimeError('0 active\\ndrivers')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert refusal("hgrn", torch.float32, gpu) == "fla-core cannot be imported (RuntimeError: 0 active drivers)"


def test_a_failed_check_counts_for_its_precision(
    tmp_path: Path, tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a made-up GPU whose bf16 kernels are wrong."""

    def run_pair(dtype: torch.dtype, head_size: int, device: torch.device) -> PairCheck:
        failure = "dk by 5.0e-01" if dtype == torch.bfloat16 else None
        return PairCheck(selfcheck.dtype_name(dtype), head_size, {"dk": 0.5 if failure else 0.0}, failure, 1.0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(selfcheck, "machine", lambda device: {"gpu": "made up"})
    monkeypatch.setattr(selfcheck, "run_pair", run_pair)
    selfcheck._forget()
    gpu = torch.device("cuda", 0)
    fp32, bf16 = (
        load_config(tiny_config(tmp_path, **{"train.precision": name, "model.head_dim": 32, "model.width": 64}))
        for name in ("fp32", "bf16")
    )
    assert choose_kernels(fp32, gpu) == {"mesa": ("triton", "its self-check passed")}
    assert choose_kernels(bf16, gpu) == {"mesa": ("torch", "triton failed its self-check: dk by 5.0e-01")}
    with pytest.raises(ConfigError, match=r"implementation is triton: .* fails its self-check here for torch.bfloat16"):
        choose_kernels(with_kernels(bf16, {"mesa": Choice("triton", "")}), gpu)
    selfcheck._forget()
