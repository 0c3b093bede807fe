"""What of a layout the comparison calls too far from float64, and the block in which float32 means float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_rl.tools.bench.compare_layouts import FACTOR, ONE_PROCESS, Difference, difference, too_far
from megatron_rl.tools.bench.float64 import Float32MeansFloat64

ONE = Difference(ONE_PROCESS, 2.0, 1e-7, 3.0, 1e-6, 1e-5, "lm_head.weight")


def test_a_layout_may_be_some_times_as_far_as_one_process():
    near = replace(ONE, layout="tp2", gradient_difference=0.99 * FACTOR * ONE.gradient_difference)
    assert too_far(near, ONE) == []
    (problem,) = too_far(replace(near, gradient_difference=1e-3), ONE)
    assert problem.startswith("tp2: the gradient of lm_head.weight is 1.0e-03 from float64, and at most 3.0e-05 is")
    (problem,) = too_far(replace(near, norm_difference=4e-5), ONE)
    assert problem.startswith("tp2: the gradient norm is 4.0e-05 from float64")
    (problem,) = too_far(replace(near, loss_difference=math.nan), ONE)
    assert problem.startswith("tp2: the loss is nan from float64")


def test_an_element_that_one_rank_alone_has_added_is_too_far():
    random = np.random.default_rng(0)
    exact = {name: random.standard_normal((64, 32)) for name in ("a", "b")}
    rounded = {name: tensor.astype(np.float32) for name, tensor in exact.items()}
    one = difference(ONE_PROCESS, (1.0, 1.0, rounded), (1.0, 1.0, exact))
    assert 1e-8 < one.gradient_difference < 6e-8
    rounded["b"][3, 4] += 1e-6
    found = difference("dp2", (1.0, 1.0, rounded), (1.0, 1.0, exact))
    assert found.tensor == "b" and len(too_far(found, one)) == 1


def test_float32_means_float64_inside_the_block_only():
    with pytest.raises(KeyError), Float32MeansFloat64():
        third = torch.ones(1, dtype=torch.float32) / 3
        made = [third, third.float(), third.to(torch.float32), torch.rand(1)]
        assert {tensor.dtype for tensor in made} == {torch.float32} and third.type() == "torch.FloatTensor"
        assert torch.arange(2).float().softmax(-1, dtype=torch.float32).dtype == torch.float32
        assert {torch.arange(2).dtype, torch.zeros(1).bfloat16().dtype} == {torch.int64, torch.bfloat16}
        raise KeyError  # an error ends the block, too
    assert {tensor.dtype for tensor in made} == {torch.float64} and float(third) == 1 / 3
    assert torch.rand(1).dtype == torch.ones(1).float().dtype == torch.float32
