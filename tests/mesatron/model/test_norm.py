"""RMSNorm against its formula in float64, per channel group, and its arithmetic under bf16."""

import pytest
import torch

from mesatron.model.norm import RMSNorm


@pytest.mark.parametrize("shape", [(7,), (3, 5)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_formula(shape: tuple[int, ...], scale: float) -> None:
    norm = RMSNorm(shape, epsilon=1e-3).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape, generator=generator))
    x = scale * torch.randn(2, 4, *shape, generator=generator, dtype=torch.float64)
    expected = x / ((x * x).sum(-1, keepdim=True) / shape[-1] + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=0)


def test_bf16_rounds_only_the_result() -> None:
    norm = RMSNorm((4096,), epsilon=1e-6).bfloat16()
    x = (3 + torch.randn(8, 4096, generator=torch.Generator().manual_seed(0))).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).double(), exact, rtol=2**-8, atol=0)
