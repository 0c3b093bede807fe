"""The loss scale of float16 after planted sequences of updates."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.actor import platform
from megatron_rl.actor.optimizer.loss_scale import INITIAL, LossScale


def settings(initial=INITIAL, lowest=1.0, window=1000):
    return SimpleNamespace(initial_loss_scale=initial, min_loss_scale=lowest, loss_scale_window=window)


def values(overflows, **given) -> list[float]:
    """The scale before each pass, and after the last one."""
    scale, found = LossScale.of(settings(**given)), []
    for overflow in overflows:
        found.append(scale.value)
        scale.halve() if overflow else scale.count()
    return [*found, scale.value]


def test_each_overflow_halves_it_and_a_window_without_one_doubles_it():
    found = values([True, False, True, False, False, False, False], initial=8.0, window=2)
    assert found == [8, 4, 4, 2, 2, 4, 4, 8]


def test_it_does_not_fall_below_its_lowest_value():
    scale = LossScale.of(settings(initial=4.0, lowest=2.0))
    assert not scale.is_lowest
    scale.halve()
    assert scale.is_lowest and scale.value == 2
    scale.halve()
    assert scale.value == 2


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.integers(0, 60))
def test_it_is_megatrons_and_its_state_continues_it(overflows, window, cut):
    with platform.running():
        from megatron.core.optimizer.grad_scaler import DynamicGradScaler

        theirs = DynamicGradScaler(2.0**8, 2.0, 2.0, 0.5, window, hysteresis=1)
        ours = LossScale.of(settings(2.0**8, 2.0, window))
        for i, overflow in enumerate(overflows):
            if i == cut:
                saved, ours = json.loads(json.dumps(ours.state())), LossScale.of(settings(1.0, 1.0, window))
                ours.lowest = 2.0
                ours.restore(saved)
            theirs.update(overflow)
            ours.halve() if overflow else ours.count()
            assert ours.value == theirs.scale.item()


def test_a_power_of_two_rounds_no_loss():
    scale, loss = LossScale.of(settings()), torch.rand(100) + 0.1
    assert torch.equal(scale.scaled(loss) / scale.value, loss)
