"""The sum of squares of tensors, against exact sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.actor.optimizer import norms

ROUNDING = 1e-14
"""float64: the error of a sum of squares grows with the square root of the number of its terms at most."""


def exact(tensors) -> float:
    """The sum of the squares, rounded once: Python's `fsum` keeps every bit, and the square of a float32 is a
    float64."""
    return math.fsum(x * x for tensor in tensors for x in tensor.flatten().tolist())


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 300), max_size=5), st.integers(1, 70))
def test_squares_of_all_magnitudes_are_added_exactly(seed, sizes, num_elements):
    """Elements of 1e-19 to 1e19, whose squares float32 cannot hold."""
    random = np.random.default_rng(seed)
    tensors = [
        torch.from_numpy((random.standard_normal(size) * 10.0 ** random.uniform(-19, 19)).astype(np.float32))
        for size in sizes
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(norms, "BLOCK_ELEMENTS", num_elements)
        found = norms.sum_of_squares(tensors)
    assert found.dtype == torch.float64 and float(found) == pytest.approx(exact(tensors), rel=ROUNDING)


def test_an_embedding_of_millions_of_elements_keeps_its_norm():
    """torch's own norm in float32 is off by up to 1e-5 here, as the running sums of a CPU's threads grow too large."""
    size = 3 * norms.BLOCK_ELEMENTS + 1
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul_(1e-3)
    gradient[:: size // 7] *= 100
    expected = math.sqrt(float(np.square(gradient.numpy().astype(np.longdouble)).sum()))
    assert math.sqrt(norms.sum_of_squares([gradient.view(1, -1)])) == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_is_told(broken):
    assert not norms.sum_of_squares([torch.ones(3), torch.tensor([1.0, broken])]).isfinite()
