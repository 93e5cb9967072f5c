"""How blocks are spread over stages, against trying every way."""

from itertools import combinations, pairwise

import pytest

from mesatron.config import ModelConfig
from mesatron.parallel.pipeline import stage_bounds


def cost(bounds: list[int], output_in_blocks: float) -> float:
    """Of the slowest stage, in blocks."""
    blocks = [end - begin for begin, end in pairwise(bounds)]
    blocks[-1] += output_in_blocks
    return max(blocks)


@pytest.mark.parametrize("vocabulary_size", [10, 3000, 50257])
@pytest.mark.parametrize(("layers", "stages"), [(2, 2), (3, 2), (7, 2), (7, 3), (12, 4), (8, 8), (9, 8)])
def test_no_other_stages_are_faster(vocabulary_size: int, layers: int, stages: int) -> None:
    model = ModelConfig(vocabulary_size=vocabulary_size, width=64, layers=layers, heads=2, head_dim=32)
    embedding = vocabulary_size * 64
    output_in_blocks = embedding / ((model.parameter_count() - embedding) / layers)
    bounds = stage_bounds(model, stages)
    assert bounds[0] == 0
    assert bounds[-1] == layers
    assert all(begin < end for begin, end in pairwise(bounds)), "a stage without blocks"
    every_way = ([0, *cuts, layers] for cuts in combinations(range(1, layers), stages - 1))
    assert cost(bounds, output_in_blocks) == min(cost(way, output_in_blocks) for way in every_way)
