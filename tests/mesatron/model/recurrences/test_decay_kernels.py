"""Weighted sums of v k^T, and decays, as Triton kernels against float64: values and every gradient, of any length and
head size."""

import pytest
import torch
from torch import Tensor

from mesatron.model.recurrences.decay import run_decays, weighted_products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUMS = 1e-4 if DEVICE == "cuda" else 2e-2  # the interpreter rounds bf16 toward zero, and sums of one sign add that up
GRADIENTS = 3e-3 if DEVICE == "cuda" else 1e-2  # of rounding the results to bf16


@pytest.mark.parametrize("tokens", [1, 64, 600], ids="{} tokens".format)
@pytest.mark.parametrize(
    ("E", "D", "squares"),
    [(128, 128, True), (64, 64, False), (129, 48, True), (18, 18, False), (64, 160, False)], ids=str,
)  # fmt: skip
def test_sums_and_gradients(tokens: int, E: int, D: int, squares: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    v, k = (torch.randn(2, tokens, 3, size, generator=generator).to(DEVICE, torch.bfloat16) for size in (E, D))
    weights = torch.rand(2, tokens, 3, generator=generator).to(DEVICE)
    weights[:, ::5] *= 1e-6
    cotangent = 1e-5 * torch.randn(2, 3, E + squares * D, D, generator=generator).to(DEVICE)

    def differentiate(implementation: str, *inputs: Tensor) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in inputs]
        sums = weighted_products(*leaves, implementation, squares)
        # Turned, as a gradient need not lie in memory as its tensor does.
        return [sums, *torch.autograd.grad(sums.mT, leaves, cotangent.to(sums.dtype).mT.contiguous())]

    exact = differentiate("torch", *(x.double() for x in (v, k, weights)))
    found = differentiate("triton", *(x.clone() for x in (v, k, weights)))
    assert [x.dtype for x in found] == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    for ours, theirs, tolerance in zip(found, exact, (SUMS, GRADIENTS, GRADIENTS, SUMS), strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) <= tolerance


@pytest.mark.parametrize(("batch", "tokens", "heads"), [(1, 1, 1), (2, 33, 5), (1, 9001, 3)])
def test_decays(batch: int, tokens: int, heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gates = -torch.rand(batch, tokens, heads, generator=generator).to(DEVICE) / 30
    gates[:, 4000::4000] = -torch.inf  # the sums up to such a token are no numbers, and get no gradient

    def differentiate(implementation: str, gates: Tensor) -> list[Tensor]:
        gates = gates.requires_grad_()
        after, total = run_decays(gates, implementation)
        factors = torch.linspace(-1, 2, tokens, device=DEVICE)[:, None]
        loss = (after.exp() * factors).sum() + 3 * (total / 10).exp().sum()
        return [after.exp(), total.exp(), *torch.autograd.grad(loss, gates)]

    exact = differentiate("torch", gates.double())
    for ours, theirs in zip(differentiate("triton", gates.clone()), exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6 * float(theirs.detach().abs().max()))
