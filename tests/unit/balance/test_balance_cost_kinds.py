from __future__ import annotations

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from small_models import model

from megatron_rl.balance import fit_cost, sample_costs, training_flops
from megatron_rl.config.balance import BalanceConfig, CostConfig

SHAPE = model("qwen3", 2, 128, 4, 2, 32, 256, 64, 512)


def cost(**given):
    return TypeAdapter(CostConfig).validate_python(given)


def test_kinds():
    lengths = np.array([1, 10, 100])
    assert sample_costs(lengths, cost(kind="tokens"), SHAPE).tolist() == [1, 10, 100]
    measured = cost(kind="measured", seconds_per_token=0.5, seconds_per_squared_token=0.25)
    assert sample_costs(lengths, measured, SHAPE).tolist() == [0.75, 30, 2550]
    assert BalanceConfig(max_tokens_per_microbatch=8).cost.kind == "flops"
    for recompute in ("none", "full"):
        expected = training_flops(lengths, SHAPE, recompute).tolist()
        assert sample_costs(lengths, cost(kind="flops"), SHAPE, recompute).tolist() == expected


def test_a_measured_cost_of_nothing_is_refused():
    with pytest.raises(ValidationError, match="both 0"):
        cost(kind="measured", seconds_per_token=0, seconds_per_squared_token=0)


LENGTHS = [[1000], [4000], [500, 500, 500], [16000], [2000, 8000], [100] * 40, [32000]]


@pytest.mark.parametrize(
    "constant, linear, quadratic", [(0.01, 2e-5, 3e-10), (0, 2e-5, 3e-10), (0.2, 0, 3e-10), (0.2, 2e-5, 0)]
)
def test_a_fit_returns_what_made_the_timings(constant, linear, quadratic):
    seconds = [constant + sum(linear * n + quadratic * n * n for n in each) for each in LENGTHS]
    fit = fit_cost(LENGTHS, seconds)
    assert fit.seconds_per_token == pytest.approx(linear, rel=1e-6, abs=1e-12)
    assert fit.seconds_per_squared_token == pytest.approx(quadratic, rel=1e-6, abs=1e-17)


def test_a_fit_of_noisy_timings_is_never_negative():
    rng = np.random.default_rng(0)
    for _ in range(50):
        seconds = [1e-5 * sum(each) * rng.uniform(0.5, 1.5) for each in LENGTHS]
        fit = fit_cost(LENGTHS, seconds)
        assert fit.seconds_per_token >= 0 and fit.seconds_per_squared_token >= 0
        # No non-negative coefficients nearby fit better.
        best = squared_error(fit.seconds_per_token, fit.seconds_per_squared_token, seconds)
        for a, b in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
            error = squared_error(fit.seconds_per_token * a, fit.seconds_per_squared_token * b, seconds)
            assert error >= best * (1 - 1e-9)


def squared_error(linear, quadratic, seconds) -> float:
    """The error of a fit with the best non-negative constant."""
    rest = np.array(seconds) - [sum(linear * n + quadratic * n * n for n in each) for each in LENGTHS]
    return float(((rest - max(rest.mean(), 0)) ** 2).sum())


@pytest.mark.parametrize(
    "lengths, seconds, message",
    [
        ([[1], [2]], [1.0, 2.0], "at least 3"),
        ([[1]] * 3, [1.0] * 4, "4 timings"),
        ([[1], [2], [3]], [3.0, 2.0, 1.0], "grow"),
    ],
)
def test_timings_that_say_nothing_are_refused(lengths, seconds, message):
    with pytest.raises(ValueError, match=message):
        fit_cost(lengths, seconds)
