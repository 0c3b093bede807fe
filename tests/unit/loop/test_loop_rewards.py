"""Rewards that score only the rows of some data sets."""

from __future__ import annotations

import pytest
from small_ports import World, config

from megatron_rl.loop.rollouts import SilentRewards, right_answers
from megatron_rl.types import Group, Prompt, Sample, Verdict

CONFIG = config(
    rewards=[
        {"kind": "exact_answer", "name": f"for_{dataset}", "datasets": [dataset], "max_silent_steps": 2}
        for dataset in ("a", "b")
    ]
)
OF_A, OF_B, UNSCORED = (
    Verdict(1.0, parts=(1.0, None)),
    Verdict(0.0, parts=(None, 0.0)),
    Verdict(None, parts=(None, None)),
)


def group(dataset: str, verdict: Verdict) -> Group:
    return Group(
        Prompt("uid", (1,), "question", {"dataset": dataset}), [Sample(3, 1, 2, 0, "stop", verdict=verdict)], None, 0
    )


def test_the_reward_that_scored_an_answer_decides_whether_it_is_right():
    assert right_answers(CONFIG, [OF_A, OF_B, UNSCORED]) == [True, False]


def test_a_reward_is_silent_only_about_rows_that_it_should_score():
    silent, sink = SilentRewards(CONFIG.rewards), World()
    for _ in range(3):
        silent.count([group("a", OF_A)], {}, sink)  # no row of b
    silent.count([group("a", OF_A), group("b", UNSCORED)], {}, sink)
    silent.count([group("a", OF_A)], {}, sink)
    with pytest.raises(ValueError, match="reward for_b scored none of 1 answers in 2 steps in a row"):
        silent.count([group("a", OF_A), group("b", UNSCORED)], {}, sink)
