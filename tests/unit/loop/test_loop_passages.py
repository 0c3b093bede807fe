from __future__ import annotations

import pytest
from small_ports import World

from megatron_rl.loop.passages import UnsplitThoughts, describe_passages
from megatron_rl.types import Group, Prompt, Sample, TokenReward


def group(*utilities: list[float]) -> Group:
    samples = []
    for own in utilities:
        rewards = [TokenReward(i, "utility", value) for i, value in enumerate(own)]
        samples.append(Sample(9, 1, 8, 0, "stop", token_rewards=(*rewards, TokenReward(8, "environment", 7.0))))
    return Group(Prompt("row", (1,), "question"), samples, None, 0)


def test_passages_are_described_over_all_answers():
    assert describe_passages([group([1.0, -0.5, 0.0], []), group([0.5])]) == {
        "passages/mean": pytest.approx(4 / 3),
        "passages/single": pytest.approx(2 / 3),
        "passages/utility_mean": pytest.approx(0.25),
        "passages/helpful": pytest.approx(0.5),
    }
    assert describe_passages([group([])]) == {"passages/mean": 0.0, "passages/single": 1.0}


def test_markers_that_never_occur_are_told_in_the_first_step():
    world, thoughts = World(), UnsplitThoughts()
    thoughts.count({"passages/single": 0.75}, world)
    thoughts.count({"passages/single": 1.0}, world)
    [warning] = world.warnings
    assert warning.startswith("75% of the answers have at most one passage of a thought")
    later = UnsplitThoughts()
    later.count({"passages/single": 0.5}, world)
    later.count({"passages/single": 1.0}, world)
    UnsplitThoughts().count({}, world)
    assert len(world.warnings) == 1
