"""Shares of parameters: those of all members of a tensor group, put together, are the whole once and in order, for
every parameter of a model, checked against the numbers 0, 1, 2, ... in it. Sizes divide by the group's except the
vocabulary's, which is filled up with zeros.
"""

import pytest
import torch

from mesatron.config import ModelConfig
from mesatron.model.backbone import Backbone
from mesatron.parallel.layout import Group
from mesatron.parallel.shares import share_of, shares, whole_parameters

MIXERS = ["mesa", "mesa", "hawk", "mlstm", "transformer", "deltanet"]
MODEL = ModelConfig(vocabulary_size=101, width=36, layers=6, heads=6, head_dim=6, mlp_ratio=1.5, mixer=MIXERS)
REPLICATED = {"mixer_norm.weight", "mlp_norm.weight", "norm.weight"}


@pytest.mark.parametrize("vocabulary_size", [101, 201])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_make_the_whole(size: int, vocabulary_size: int) -> None:
    model = MODEL.model_copy(update={"vocabulary_size": vocabulary_size})
    whole = whole_parameters(model)
    with torch.device("meta"):
        local = {name: p.shape for name, p in Backbone(share_of(model, size)).named_parameters()}
    members = [shares(whole, local, Group(rank, size)) for rank in range(size)]
    for name, parameter in whole.items():
        value = torch.arange(parameter.numel()).view(parameter.shape) + 1
        parts = [member[name].cut(value) for member in members]
        assert all(part.shape == local[name] for part in parts)
        dimension = members[0][name].dimension
        if dimension is None:
            assert size == 1 or name in REPLICATED or name.split(".", 2)[-1] in REPLICATED
            assert all(torch.equal(part, value) for part in parts)
            continue
        joined = torch.cat(parts, dimension)
        assert torch.equal(joined.narrow(dimension, 0, parameter.shape[dimension]), value)
        beyond = joined.narrow(dimension, parameter.shape[dimension], joined.shape[dimension] - value.shape[dimension])
        assert not beyond.any()
        assert beyond.numel() == 0 or name == "embedding.weight"


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("pieces", [1, 4, 7])
def test_stretches_say_where_the_pieces_of_a_share_lie(size: int, pieces: int) -> None:
    """Pieces of equal length, the last of which reaches beyond the share, as ZeRO cuts it."""
    whole = whole_parameters(MODEL)
    with torch.device("meta"):
        local = {name: p.shape for name, p in Backbone(share_of(MODEL, size)).named_parameters()}
    members = [shares(whole, local, Group(rank, size)) for rank in range(size)]
    for name, parameter in whole.items():
        value = torch.arange(parameter.numel()) + 1
        written = torch.zeros_like(value)
        for share in [member[name] for member in members]:
            part = share.cut(value.view(parameter.shape)).flatten()
            length = -(-len(part) // pieces)
            for start in range(0, pieces * length, length):
                stretches = list(share.stretches(start, start + length))
                for there, here, count in stretches:
                    piece = part[start + here : start + here + count]
                    assert torch.equal(value[there : there + count], piece)
                    written[there : there + count] = piece
                # What no stretch covers is beyond the whole, where `cut` has put zeros.
                assert sum(count for *_, count in stretches) == int((part[start : start + length] != 0).sum())
        assert torch.equal(written, value), name


@pytest.mark.parametrize(
    ("words", "size", "share"),
    [(50_257, 1, 50_257), (50_257, 2, 25_152), (50_257, 4, 12_608), (64, 2, 32), (128, 2, 64), (130, 2, 128)],
)
def test_a_share_of_the_words_suits_a_gpu(words: int, size: int, share: int) -> None:
    """A multiple of 64, unless there are too few words for shares that differ from the whole."""
    assert share_of(MODEL.model_copy(update={"vocabulary_size": words}), size).vocabulary_size == share


def test_heads_stay_whole() -> None:
    """A member's rows of q, gates, convolution, Lambda and output norm belong to the same heads."""
    local = {name: p.shape for name, p in Backbone(share_of(MODEL, 3)).named_parameters()}
    second = shares(whole_parameters(MODEL), local, Group(1, 3))
    heads = torch.arange(6)
    by_row = {"q.weight": heads.repeat_interleave(6)[:, None].expand(36, 36), "gamma.bias": heads,
              "beta.weight": heads[:, None].expand(6, 36), "theta": heads[:, None].expand(6, 6),
              "k_convolution.weight": heads.repeat_interleave(6)[:, None].expand(36, 4),
              "norm.weight": heads[:, None].expand(6, 6),
              "output.weight": heads.repeat_interleave(6).expand(36, 36)}  # fmt: skip
    for name, owner in by_row.items():
        assert second[f"blocks.1.mixer.{name}"].cut(owner).unique().tolist() == [2, 3], name
