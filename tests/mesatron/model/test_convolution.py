"""The short convolution against torch's grouped conv1d: whole, in pieces, and for packed documents each alone; its
heads of norm 1 against their formula."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mesatron.model.convolution import ShortConvolution, positions_in_documents

CHANNELS, HEAD = 6, 3


def make_convolution(width: int) -> ShortConvolution:
    convolution = ShortConvolution(CHANNELS, width, HEAD).double()
    with torch.no_grad():
        convolution.weight.copy_(torch.randn(CHANNELS, width, generator=torch.Generator().manual_seed(width)))
    return convolution


def make_input(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, CHANNELS, generator=generator, dtype=torch.float64)


def expected_heads(convolution: ShortConvolution, x: Tensor) -> Tensor:
    """torch correlates, so its filter runs backwards in time."""
    kernel = convolution.weight.flip(1)[:, None]
    y = F.conv1d(F.pad(x.mT, (convolution.width - 1, 0)), kernel, groups=CHANNELS).mT
    heads = (y / (1 + (-y).exp())).unflatten(-1, (-1, HEAD))
    return heads / heads.square().sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 17])
def test_whole_and_in_pieces(width: int, length: int) -> None:
    convolution, x = make_convolution(width), make_input(2, length)
    expected = expected_heads(convolution, x)
    torch.testing.assert_close(convolution(x)[0], expected, rtol=0, atol=1e-13)
    for size in (1, 2, 5):
        pieces, history = [], None
        for piece in x.split(size, dim=1):
            y, history = convolution(piece, history)
            pieces.append(y)
        torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_packed_documents_are_as_if_alone(width: int) -> None:
    convolution, bounds = make_convolution(width), [0, 1, 3, 6, 6, 10, 19]
    x = make_input(1, bounds[-1])
    alone = [expected_heads(convolution, x[:, start:end]) for start, end in itertools.pairwise(bounds) if end > start]
    packed, _ = convolution(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-13)


def test_positions_skip_empty_documents() -> None:
    bounds = torch.tensor([0, 0, 2, 2, 2, 5], dtype=torch.int32)
    assert positions_in_documents(bounds, 5).tolist() == [0, 1, 0, 1, 2]
