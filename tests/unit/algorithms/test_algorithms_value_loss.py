from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.algorithms.value_loss import explained_variance, value_loss
from megatron_rl.config.value_loss import ValueLossConfig


def tensor(values, **options) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, **options)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope", "clipped"),
    [
        (0.2, 0.0, 2.0, 1.62, -1.8, False),  # within the clip: (2 - .2)^2 / 2
        (1.0, 0.0, 2.0, 1.125, 0.0, True),  # moved enough towards the target: (2 - .5)^2 / 2
        (-1.0, 0.0, 2.0, 4.5, -3.0, False),  # moved away: not clipped
        (1.0, 0.0, 0.6, 0.08, 0.4, False),  # the clipped value is nearer to the target than this one
        (2.0, 0.0, 2.0, 1.125, 0.0, True),
    ],
)
def test_golden_clipped(value, old, target, loss, slope, clipped):
    value_T = tensor([value], requires_grad=True)
    loss_T, clipped_T = value_loss(value_T, tensor([old]), tensor([target]), clip=0.5)
    loss_T.sum().backward()
    # float64 rounding.
    assert loss_T.item() == pytest.approx(loss, abs=1e-12)
    assert value_T.grad.item() == pytest.approx(slope, abs=1e-12)
    assert clipped_T.tolist() == [clipped]


def test_golden_huber_and_no_clip():
    value_T = tensor([0.0, 0.0, 9.0], requires_grad=True)
    loss_T, clipped_T = value_loss(
        value_T, tensor([0.0, 0, 0]), tensor([0.5, 3, 9]), clip=None, kind="huber", delta=2.0
    )
    loss_T.sum().backward()
    assert loss_T.tolist() == [0.125, 2 * 3 - 2, 0] and value_T.grad.tolist() == [-0.5, -2, 0]
    assert not clipped_T.any()
    squared_T, _ = value_loss(value_T, tensor([0.0, 0, 0]), tensor([0.5, 3, 9]), clip=None)
    assert squared_T.tolist() == [0.125, 4.5, 0]


def slow_loss(value, old, target, clip, kind, delta):
    def one(x):
        error = abs(x - target)
        return error**2 / 2 if kind == "squared" or error <= delta else delta * error - delta**2 / 2

    near = min(max(value, old - clip), old + clip) if clip else value
    return max(one(value), one(near))


numbers = st.floats(-3, 3)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20), st.sampled_from(["squared", "huber"]))
def test_equals_a_loop_and_never_below_the_plain_loss(rows, kind):
    value, old, target = (tensor(column) for column in zip(*rows, strict=True))
    loss_T, clipped_T = value_loss(value, old, target, clip=0.4, kind=kind, delta=0.7)
    expected = [slow_loss(*row, 0.4, kind, 0.7) for row in rows]
    # float64, a few operations on numbers below 7.
    torch.testing.assert_close(loss_T, tensor(expected), rtol=1e-12, atol=1e-12)
    plain_T, _ = value_loss(value, old, target, clip=None, kind=kind, delta=0.7)
    assert (loss_T >= plain_T).all() and ((loss_T > plain_T) == clipped_T).all()


@pytest.mark.parametrize("kind", ["squared", "huber"])
def test_gradcheck(kind):
    generator = torch.Generator().manual_seed(0)
    value, old, target = (torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(3))
    value.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, target, clip=0.3, kind=kind)[0], value)


def test_explained_variance_golden():
    returns, mask = tensor([1.0, 2, 6, 99]), torch.tensor([True, True, True, False])
    values = tensor([0.0, 2, 4, math.nan])
    expected = 1 - statistics.pvariance([1, 0, 2]) / statistics.pvariance([1, 2, 6])
    assert explained_variance(values, returns, mask).item() == pytest.approx(expected, rel=1e-12)
    assert explained_variance(returns + 7, returns, mask).item() == pytest.approx(1, abs=1e-12)
    assert explained_variance(torch.zeros(4), returns, mask).item() == 0


@pytest.mark.parametrize("returns", [[0.1] * 7, [3.0], [], [0.0, 0.0]])
def test_explained_variance_of_returns_that_do_not_vary(returns):
    returns = tensor(returns)
    assert explained_variance(torch.zeros(len(returns)), returns, torch.ones(len(returns), dtype=torch.bool)).isnan()


def test_the_configuration():
    assert ValueLossConfig(cliprange_value=None).cliprange_value is None
    for bad in ({"cliprange_value": 0}, {"kind": "absolute"}, {"huber_delta": -1}, {"clip": 0.2}):
        with pytest.raises(ValidationError):
            ValueLossConfig(**bad)
