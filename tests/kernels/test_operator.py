"""The operator's front: names of implementations and refusal of arguments that do not fit, by their messages."""

import mesatron_kernels
import pytest
import torch
from mesatron_kernels import MesaState, mesa
from torch import Tensor


def arguments(batch: int = 2) -> dict[str, Tensor]:
    tokens, gates = torch.ones(batch, 7, 2, 6), torch.zeros(batch, 7, 2)
    return {"q": tokens, "k": tokens, "v": tokens, "log_gamma": gates, "beta": gates, "lam": torch.ones(2, 6)}


def test_unknown_implementation_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fast'.*auto, reference, torch"):
        mesa(**arguments(), implementation="fast")
    assert mesatron_kernels.resolve("reference", "cpu", torch.float32, 6) == ("reference", "as asked")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": torch.ones(2, 7, 1)}, r"beta has shape \(2, 7, 1\) where q calls for \(2, 7, 2\)"),
        ({"initial_state": MesaState(torch.ones(1, 2, 6, 6), torch.ones(2, 2, 6, 6))}, r"state\.H .* \(1, 2, 6, 6\)"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "batch of 1, not 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesa(**arguments() | changes)


@pytest.mark.parametrize("bounds", [[1, 7], [0, 6], [0, 5, 4, 7]])
def test_document_bounds_that_do_not_fit_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="rise from 0 to 7"):
        mesa(**arguments(batch=1), cu_seqlens=torch.tensor(bounds))
