"""The distribution of layers over the parts of a pipeline, against a search through all of them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.balance.flops import flops_by_layer, forward_flops
from megatron_rl.balance.stages import Load, distribute_layers
from megatron_rl.config.package_files import find_shipped
from megatron_rl.models import read_shape

loads = st.builds(Load, st.integers(1, 9).map(float), st.integers(1, 9).map(float))


def loads_of(counts, layers, first, last) -> list[Load]:
    """The load of each part."""
    ends = np.cumsum(counts)
    parts = [[*layers[end - count : end]] for count, end in zip(counts, ends, strict=True)]
    parts[0].append(first)
    parts[-1].append(last)
    return [Load(*np.sum(part, 0)) for part in parts]


def largest(counts, *model) -> tuple[float, float]:
    parts = loads_of(counts, *model)
    return max(part.flops for part in parts), max(part.parameters for part in parts)


@given(st.lists(loads, min_size=1, max_size=8), loads, loads, st.data())
def test_no_other_distribution_is_better(layers, first, last, data):
    num_parts = data.draw(st.integers(1, len(layers)))
    counts = distribute_layers(layers, first, last, num_parts)
    assert len(counts) == num_parts and sum(counts) == len(layers) and min(counts) >= 1
    cuts = combinations(range(1, len(layers)), num_parts - 1)
    every = [np.diff([0, *cut, len(layers)]).tolist() for cut in cuts]
    assert largest(counts, layers, first, last) == min(largest(other, layers, first, last) for other in every)


def test_golden():
    """The output layer costs as much as 1.6 layers, and the embedding has as many parameters. With 17 layers the
    slowest of four stages is as fast as possible. Then the last stage may have 15 layers, and the first one gets so
    few that no stage has the parameters of more than 17 layers."""
    counts = distribute_layers([Load(1.0, 1.0)] * 64, Load(0.0, 1.6), Load(1.6, 1.6), 4)
    assert max(counts) == 17 and counts[0] <= 15 and counts[-1] <= 15


def test_more_parts_than_layers_are_refused():
    with pytest.raises(ValueError, match="2 layers.*for 3.*policy.parallel.pipeline"):
        distribute_layers([Load(1, 1)] * 2, Load(0, 0), Load(0, 0), 3)


@pytest.mark.parametrize("name", ["Qwen3-32B", "Qwen3-235B-A22B", "DeepSeek-V3", "Olmo-3-32B-Think-DPO"])
@pytest.mark.parametrize("length", [100, 40_000])
def test_flops_by_layer_add_up(name, length):
    shape = read_shape(find_shipped(Path("configs", "model", f"{name}.json")))
    output = 2 * shape.hidden_size * shape.vocab_size * length
    assert sum(flops_by_layer(length, shape)) == pytest.approx(
        float(forward_flops(np.array([length]), shape)[0]) - output
    )
