"""The Mesa layer's gates and Lambda against their formulas in float64 (arXiv 2506.05233, section G.5), saturated gates
included; what it reports for the monitor; and a state that a run of one token cannot blow up."""

import pytest
import torch
from torch import Tensor

from mesatron.config import ModelConfig
from mesatron.model.mixers import build_mixer
from mesatron.model.mixers.mesa import MesaMixer
from mesatron.model.parameter import ParameterInfo, initial_value
from mesatron.model.seams import Seams

WIDTH, HEADS, CAP = 8, 4, 0.9975


def make_mixer(beta: float, gamma: float, **mesa: object) -> MesaMixer:
    """A layer with gate logits of about `beta` and `gamma`."""
    config = {"vocabulary_size": 3, "width": WIDTH, "layers": 1, "heads": HEADS, "head_dim": 2, "mesa": mesa}
    mixer = build_mixer(ModelConfig.model_validate(config), Seams())
    assert isinstance(mixer, MesaMixer)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            parameter.add_(initial_value(name, parameter.shape, ParameterInfo(0.0, 0.3, True), seed=0))
        mixer.beta.bias.add_(beta)
        mixer.gamma.bias.add_(gamma)
    return mixer


def make_input(length: int = 50) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("beta_logit", [-30.0, -2.0, 0.0, 4.0, 30.0])
@pytest.mark.parametrize("gamma_logit", [-30.0, -2.0, 0.0, 6.9, 30.0])
@pytest.mark.parametrize("cap", [CAP, 1.0, 0.5])
def test_gates_and_their_cap(beta_logit: float, gamma_logit: float, cap: float) -> None:
    mixer, x = make_mixer(beta_logit, gamma_logit, gamma_cap=cap), make_input()
    mixer(x)
    beta, gamma = (
        torch.sigmoid(x.double() @ gate.weight.double().T + gate.bias.double()) for gate in (mixer.beta, mixer.gamma)
    )
    gamma = gamma * (1 - (1 - cap) * beta.square())
    seen = mixer.observations
    torch.testing.assert_close(seen["beta"].double(), beta, rtol=1e-5, atol=0)
    torch.testing.assert_close(seen["gamma"].double(), gamma, rtol=1e-5, atol=0)
    torch.testing.assert_close(1 - seen["gamma"].double(), 1 - gamma, rtol=1e-3, atol=1e-7)
    if beta_logit == 30 and gamma_logit == 30:
        torch.testing.assert_close(seen["gamma"], torch.full_like(seen["gamma"], cap))
    lam = 0.25 + (1 + mixer.theta.double().exp()).log()
    torch.testing.assert_close(seen["lambda"].double(), lam, rtol=1e-6, atol=0)


def test_bf16_keeps_gates_and_lambda_in_fp32() -> None:
    mixer, x = make_mixer(0.0, 6.9), make_input().bfloat16().float()
    mixer(x)
    exact = mixer.observations
    mixer.bfloat16()(x.bfloat16())
    seen = mixer.observations
    assert {seen[name].dtype for name in ("gamma", "beta", "lambda")} == {torch.float32}
    # The bias of about 6.9 itself is off by up to 1/64 in bf16; gates computed in bf16 would be off by a factor.
    torch.testing.assert_close(1 - seen["gamma"], 1 - exact["gamma"], rtol=0.03, atol=0)
    assert (1 - exact["gamma"].bfloat16() == 0).any()


def test_observations_are_the_solver_s_own_and_hold_no_graph() -> None:
    mixer, x = make_mixer(0.0, 3.0, solver_tolerance=1e-3), make_input()
    mixer(x)
    steps, residual = mixer.observations["solver/steps"], mixer.observations["solver/residual"]
    assert residual.max() <= 1e-3
    assert 1 <= steps.max() <= 30
    assert not any(tensor.requires_grad for tensor in mixer.observations.values())
    fixed = make_mixer(0.0, 3.0, solver_tolerance=0.0, solver_steps=2)
    fixed(x)
    assert (fixed.observations["solver/steps"] == 2).all()


def test_a_long_run_of_one_token_stays_bounded() -> None:
    """Section G.5's reason for the cap: H sums one outer product and the cap keeps it below 1 / (1 - cap)."""
    mixer = make_mixer(30.0, 30.0)
    x = make_input(1).expand(2, 3000, WIDTH)
    with torch.no_grad():
        y, state = mixer(x, keep_state=True)
    assert y.isfinite().all()
    assert torch.linalg.matrix_norm(state.memory.H, 2).max() <= 1 / (1 - CAP) * 1.001
    torch.testing.assert_close(y[:, -1], y[:, -1000], rtol=1e-2, atol=1e-3)
