"""Runs of a sequence, each from the combined summaries of those before it, against the operator on the whole sequence.

In float64, outputs and all gradients, with documents that begin anywhere and gates that forget everything; the
processes' exchange is replaced by doing one run after the other, which is all that the exchange is about. What
processes send each other is checked in test_exchange.py, whole layouts in prove/test_table.py.
"""

import pytest
import torch
from mesatron_kernels import MesaState, mesa
from torch import Tensor

from mesatron.parallel.context import combine, summarize

HOW = {"max_steps": 200, "tolerance": 1e-13, "chunk_size": 8, "cu_seqlens": None, "return_state": True}


def run_after_run(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor, beta: Tensor, lam: Tensor, runs: int, **how: object
) -> tuple[Tensor, MesaState]:
    """o of the whole sequence and the state after it, from `runs` runs."""
    pieces = [[x.chunk(runs, 1)[i] for x in (q, k, v, log_gamma, beta)] for i in range(runs)]
    summaries, log_decays = map(torch.stack, zip(*(summarize(*piece[1:]) for piece in pieces), strict=True))
    outputs = []
    for i, piece in enumerate(pieces):
        before = combine(summaries[:i], log_decays[:i])
        state = MesaState(*before.split(k.shape[-1], -2))
        outputs.append(mesa(*piece, lam, initial_state=state, **how).o)
    after = combine(summaries, log_decays)
    return torch.cat(outputs, 1), MesaState(*after.split(k.shape[-1], -2))


def inputs(B: int, T: int, h: int, D: int, Dv: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, h, D, generator=draw), dim=-1) for _ in range(2))
    v = torch.randn(B, T, h, Dv, generator=draw)
    log_gamma = -torch.rand(B, T, h, generator=draw) * 0.1
    beta = torch.rand(B, T, h, generator=draw)
    lam = 0.25 + torch.rand(h, D, generator=draw)
    return [x.to(device, dtype) for x in (q, k, v, log_gamma, beta, lam)]


@pytest.mark.parametrize("starts", [[], [0], [13, 14, 40, 74, 75, 76, 100]], ids=str)
def test_runs_equal_the_whole(starts: list[int]) -> None:
    tensors = inputs(B=2, T=185, h=3, D=5, Dv=4, dtype=torch.float64)
    tensors[3][:, starts] = float("-inf")
    tensors[3][1, 150] = -1e4
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(2, 185, 3, 4, generator=draw, dtype=torch.float64)
    results = []
    for runs in (None, 5):
        leaves = [x.clone().requires_grad_() for x in tensors]
        if runs is None:
            whole = mesa(*leaves, **HOW)
            o, state = whole.o, whole.state
        else:
            o, state = run_after_run(*leaves, runs, **HOW)
        ((o * weight).sum() + state.H.square().sum() + state.G.square().sum()).backward()
        results.append([o.detach(), state.H.detach(), state.G.detach(), *(x.grad for x in leaves)])
    for expected, found in zip(*results, strict=True):
        assert torch.isfinite(expected).all()
        assert (found - expected).norm() <= 1e-10 * expected.norm()


def test_a_long_run_keeps_its_decay() -> None:
    """Over 100,000 tokens of gamma near 1 the sum of logarithms is taken in float64: fp32 would lose 1e-3."""
    length = 100_000
    log_gamma = torch.full((1, length, 1), -1e-4)
    k = torch.ones(1, length, 1, 1)
    summary, log_decay = summarize(k, k, log_gamma, torch.ones(1, length, 1))
    gamma = log_gamma[0, 0, 0].double().exp()
    exact = (1 - gamma**length) / (1 - gamma)
    assert log_decay.item() == pytest.approx(length * log_gamma[0, 0, 0].double().item(), rel=1e-6)
    assert summary.flatten().tolist() == pytest.approx([exact.item()] * 2, rel=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="131,072 tokens need a GPU")
def test_one_long_sequence_in_sixteen_runs() -> None:
    """1 x 131,072 tokens in fp32."""
    tensors = inputs(B=1, T=131_072, h=2, D=64, Dv=64, dtype=torch.float32, device="cuda")
    how = HOW | {"max_steps": 30, "tolerance": 1e-6, "chunk_size": 64}
    whole = mesa(*tensors, **how)
    o, state = run_after_run(*tensors, 16, **how)
    for found, expected in ((o, whole.o), (state.H, whole.state.H), (state.G, whole.state.G)):
        assert (found - expected).norm() <= 2e-5 * expected.norm()
