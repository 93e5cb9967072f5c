"""The benchmark's figures: bytes and rates from first principles, errors and failures of contenders with planted
mistakes."""

import pytest
import torch
from mesatron_kernels import accuracy, bench
from torch import Tensor

CPU = torch.device("cpu")
SMALL = bench.Setting(
    batch=2, length=65, heads=2, head_size=16, dtype="float32", max_steps=30, tolerance=1e-6, inputs="silu", gamma=None,
    lam=1.0,
)  # fmt: skip


def planted(name: str, change) -> bench.Contender:
    """The torch implementation behind a change of its inputs."""

    def make(setting: bench.Setting, cu_seqlens: Tensor | None) -> accuracy.Operator:
        inner = bench.ours("torch").operator(setting, cu_seqlens)
        return lambda *inputs: inner(*change(*inputs))

    return bench.Contender(name, make)


def crash(*inputs: Tensor) -> tuple[Tensor, ...]:
    raise RuntimeError("no such\nkernel")


@pytest.mark.parametrize("documents", [0, 3])
def test_errors_are_those_of_the_contender(documents: int) -> None:
    setting = bench.Setting(**vars(SMALL) | {"documents": documents, "cotangent_scale": 1e-6})
    contenders = [
        bench.ours("torch"),
        planted("crash", crash),
        planted("half v", lambda q, k, v, *rest: (q, k, 0.5 * v, *rest)),
        bench.sdpa(),
    ]
    good, crashed, wrong, attention = bench.bench_sequence(contenders, setting, bench.Clock(CPU))
    assert max(good.errors.values()) < 1e-5
    assert list(good.errors) == ["o", "dq", "dk", "dv", "dlog_gamma", "dbeta", "dlam"]
    assert crashed.failure == "RuntimeError: no such kernel"
    assert crashed.forward_ms is None
    assert wrong.errors["o"] == pytest.approx(0.5, rel=1e-3)
    assert wrong.errors["dv"] == pytest.approx(0.5, rel=1e-3)
    assert attention.errors == {}
    assert min(row.forward_ms for row in (good, wrong, attention)) > 0
    assert good.total_ms > 0


def test_errors_of_long_inputs_are_those_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that end beyond the part end with it."""
    monkeypatch.setattr(bench, "EXACT_TOKENS", 50)
    monkeypatch.setattr(bench, "EXACT_HEADS", 1)
    setting = bench.Setting(**vars(SMALL) | {"documents": 3})
    inputs, bounds = setting.draw(CPU), setting.bounds(CPU)
    assert bounds.tolist() == [0, 43, 86, 130]
    part, cotangent, kept = bench._part(inputs, inputs["v"], bounds)
    assert kept.tolist() == [0, 43, 50]
    assert torch.equal(cotangent, inputs["v"][:, :50, :1])
    assert torch.equal(part["lam"], inputs["lam"][:1])
    (row,) = bench.bench_sequence([bench.ours("torch")], setting, bench.Clock(CPU))
    assert max(row.errors.values()) < 1e-5


def test_decode_counts_the_bytes_of_both_states() -> None:
    rows = list(bench.bench_decode(["torch", "reference"], SMALL, bench.Clock(CPU)))
    assert [row.solver for row in rows] == ["5 steps", "30 steps", "to 1e-3"] * 2
    for row in rows:
        assert row.failure is None
        assert row.tb_per_second * row.milliseconds * 1e9 == pytest.approx(2 * 2 * 4 * 2 * 2 * 16 * 16)
    torch_errors = [row.error for row in rows[:3]]
    assert torch_errors[1] < 1e-6 < torch_errors[2] < 2e-3
    assert max(row.error for row in rows[3:]) < 1e-6


def test_a_decode_step_that_fails_is_a_row() -> None:
    rows = list(bench.bench_decode(["nonesuch"], SMALL, bench.Clock(CPU)))
    assert all("'nonesuch' is unknown" in row.failure for row in rows)


def test_keys_are_as_hard_as_their_names_say() -> None:
    """Share of the largest eigenvalue of the keys' Gram matrix: 1 for identical ones, spread thin for normal ones."""

    def largest(keys: accuracy.Keys) -> float:
        k = accuracy.draw_inputs(keys, 1, 512, 1, 64, dtype=torch.float32, device=CPU)["k"][0, :, 0]
        assert torch.allclose(k.norm(dim=-1), torch.ones(512))
        return float(torch.linalg.eigvalsh(k.mT @ k)[-1] / 512)

    normal, silu, lowrank, identical = (largest(keys) for keys in ("normal", "silu", "lowrank", "identical"))
    assert normal < 0.04 < 0.1 < silu
    assert 0.2 < lowrank < 0.9
    assert identical == pytest.approx(1)
