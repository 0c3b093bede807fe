"""A slow rank is named when it is slow for long, and once."""

from __future__ import annotations

from small_ports import World

from megatron_rl.loop.health.stragglers import NUM_STEPS, RATIO, Stragglers


def test_a_rank_is_named_after_some_steps_in_a_row():
    world, stragglers = World(), Stragglers()

    def step(rank: int, ratio: float) -> None:
        update = {"slowest_rank/number": float(rank), "slowest_rank/ratio": ratio}
        stragglers.count([{"slowest_rank/number": 0.0, "slowest_rank/ratio": 9.0}, update], world)
        assert update == {"slowest_rank/ratio": ratio}

    for _ in range(NUM_STEPS - 1):
        step(3, 2.04)
    step(1, 2.0)  # another one
    for _ in range(NUM_STEPS - 1):
        step(3, 2.04)
    step(3, 1.4)  # not slow
    for _ in range(NUM_STEPS - 1):
        step(3, RATIO)
    assert world.warnings == []
    step(3, 2.04)
    assert len(world.warnings) == 1
    assert world.warnings[0].startswith("trainer rank 3 is slow: the same matrix product takes it 2.0 times as long")
    step(3, 2.04)
    assert len(world.warnings) == 1


def test_a_policy_that_does_not_measure_is_not_judged():
    world, stragglers = World(), Stragglers()
    for _ in range(NUM_STEPS):
        stragglers.count([{"loss": 1.0}], world)
    assert world.warnings == []
