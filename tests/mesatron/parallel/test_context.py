"""Runs of a sequence, each from the combined summaries of those before it, where sequences are long.

Short ones of every recurrence, in float64 and with gradients, are in model/test_mixers.py; what processes send each
other is checked in test_exchange.py, whole layouts in prove/test_table.py.
"""

import pytest
import torch
from torch import Tensor

from mesatron.model.convolution import ShortConvolution
from mesatron.model.recurrences import Mesa, MesaInputs
from mesatron.parallel.context import _WithTail


def inputs(B: int, T: int, h: int, D: int, Dv: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, h, D, generator=draw), dim=-1) for _ in range(2))
    v = torch.randn(B, T, h, Dv, generator=draw)
    log_gamma = -torch.rand(B, T, h, generator=draw) * 0.1
    beta = torch.rand(B, T, h, generator=draw)
    lam = 0.25 + torch.rand(h, D, generator=draw)
    return [x.to(device, dtype) for x in (q, k, v, log_gamma, beta, lam)]


def test_a_long_run_keeps_its_decay() -> None:
    """Over 100,000 tokens of gamma near 1 the sum of logarithms is taken in float64: fp32 would lose 1e-3."""
    length = 100_000
    log_gamma = torch.full((1, length, 1), -1e-4)
    k = torch.ones(1, length, 1, 1)
    mesa = Mesa(torch.ones(1, 1), max_steps=30, tolerance=1e-6, chunk_size=64, implementation="torch")
    summary, log_decay = mesa.summarize(MesaInputs(k, k, k, log_gamma, torch.ones(1, length, 1)))
    gamma = log_gamma[0, 0, 0].double().exp()
    exact = (1 - gamma**length) / (1 - gamma)
    assert log_decay.item() == pytest.approx(length * log_gamma[0, 0, 0].double().item(), rel=1e-6)
    assert summary.flatten().tolist() == pytest.approx([exact.item()] * 2, rel=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="131,072 tokens need a GPU")
def test_one_long_sequence_in_sixteen_runs() -> None:
    """1 x 131,072 tokens in fp32."""
    *tokens, lam = inputs(B=1, T=131_072, h=2, D=64, Dv=64, dtype=torch.float32, device="cuda")
    mesa = Mesa(lam, max_steps=30, tolerance=1e-6, chunk_size=64, implementation="auto")
    whole = mesa(MesaInputs(*tokens), return_state=True)
    runs = [MesaInputs(*(x.chunk(16, 1)[i] for x in tokens)) for i in range(16)]
    summaries = [torch.stack(parts) for parts in zip(*map(mesa.summarize, runs), strict=True)]
    o = torch.cat([mesa(run, mesa.combine([x[:i] for x in summaries])).o for i, run in enumerate(runs)], 1)
    state = mesa.combine(summaries)
    for found, expected in ((o, whole.o), (state.H, whole.state.H), (state.G, whole.state.G)):
        assert (found - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("then", ["unit", "silu", "nothing"])
def test_a_tail_adds_its_gradient_to_that_of_a_convolution(then: str, documents: bool) -> None:
    """In place, and to nothing else: the rest is as autograd has it for a slice."""
    draw = torch.Generator().manual_seed(0)
    x, before, dtail = (torch.randn(2, T, 12, generator=draw, dtype=torch.float64) for T in (9, 3, 3))
    convolution = ShortConvolution(12, 4, 6, "torch", then).double()  # type: ignore[arg-type]
    with torch.no_grad():
        convolution.weight.copy_(torch.randn(12, 4, generator=draw))
    found = []
    for with_tail in (lambda runs: _WithTail.apply(runs, 3), lambda runs: (runs, runs[:, -3:])):
        leaf, history = (tensor.clone().requires_grad_() for tensor in (x, before))
        runs, tail = with_tail(leaf * 1)
        if documents:
            bounds = torch.tensor([0, 12, 17, 24])
            y, _ = convolution(torch.cat([history, runs], 1).view(1, 24, 12), None, bounds)
        else:
            y, _ = convolution(runs, history)
        cotangents = [torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view_as(y), dtail]
        kept = [cotangent.clone() for cotangent in cotangents]
        found.append(torch.autograd.grad([y, tail], [leaf, history, convolution.weight], cotangents))
        assert all(map(torch.equal, cotangents, kept))
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
