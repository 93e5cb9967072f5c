"""Gate logits against float64 when weights and inputs are bf16, where bf16 arithmetic itself would lose the gate."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.model.linear import GateProjection, gate_logits

WIDTH, LOGIT = 512, 6.9  # a gate of 0.999: a decay horizon of 1000 tokens


def gate_and_input() -> tuple[GateProjection, Tensor]:
    """In bf16, 64 tokens whose logits lie within 6.9 +- 0.2."""
    generator = torch.Generator().manual_seed(0)
    gate, x = GateProjection(WIDTH, 4), torch.randn(64, WIDTH, generator=generator)
    with torch.no_grad():
        gate.weight.copy_(0.2 * WIDTH**-0.5 * torch.randn(4, WIDTH, generator=generator).clamp(-1, 1))
        gate.bias.fill_(LOGIT)
    return gate.bfloat16(), x.bfloat16()


def forgotten(logits: Tensor) -> Tensor:
    """1 - sigmoid, without its own rounding."""
    return torch.sigmoid(-logits.double())


def test_bf16_weights_keep_the_horizon() -> None:
    gate, x = gate_and_input()
    exact = forgotten(x.double() @ gate.weight.double().T + gate.bias.double())
    logits = gate(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(forgotten(logits), exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(1 - torch.sigmoid(logits).double(), exact, rtol=1e-3, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(forgotten(gate(x)), exact, rtol=1e-4, atol=0)
    naive = F.linear(x, gate.weight, gate.bias)
    assert (forgotten(naive) / exact - 1).abs().max() > 0.01
    assert (torch.sigmoid(naive) == 1).any(), "bf16 has no number between 0.996 and 1"


def test_casting_the_weights_moves_the_horizon_by_less_than_a_percent() -> None:
    generator = torch.Generator().manual_seed(1)
    gate = GateProjection(WIDTH, 4)
    with torch.no_grad():
        gate.weight.copy_(0.1 * WIDTH**-0.5 * torch.randn(4, WIDTH, generator=generator))
        gate.bias.fill_(LOGIT)
    x = torch.randn(64, WIDTH, generator=generator).bfloat16()
    before = forgotten(gate(x))
    torch.testing.assert_close(forgotten(gate.bfloat16()(x)), before, rtol=0.01, atol=0)


def test_gradients_of_several_gates_of_one_input() -> None:
    """Of x and every weight, in bf16 against float64: no further off than the rounding of the results. That of the
    cotangent to bf16, to 1 everywhere, would be."""
    (first, x), (second, _) = gate_and_input(), gate_and_input()
    with torch.no_grad():
        second.weight.mul_(torch.linspace(-2, 2, WIDTH))
    draw = torch.Generator().manual_seed(0)
    cotangent = 1.0037 * (torch.randn(64, 8, generator=draw, dtype=torch.float64) + 0.5).sign()
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        gates = [gate.to(dtype) for gate in (first, second)]
        leaves = [x.to(dtype).requires_grad_(), *(p for gate in gates for p in gate.parameters())]
        logits = torch.cat(gate_logits(leaves[0], *gates), -1)
        found.append([logits, *torch.autograd.grad(logits, leaves, cotangent.to(logits.dtype))])
    for number, (exact, ours) in enumerate(zip(*found, strict=True)):
        assert ours.shape == exact.shape
        error = (ours.double() - exact).norm() / exact.norm()
        # A bias's few numbers may all be rounded by as much as bf16 ever rounds.
        limit = 1e-6 if number == 0 else 2**-8 if ours.ndim == 1 else 2.5e-3
        assert error < limit, f"{number}: {error:.1e}"


def test_no_token_has_no_logits() -> None:
    gate, x = gate_and_input()
    assert gate(x.new_empty(2, 0, WIDTH)).shape == (2, 0, 4)
