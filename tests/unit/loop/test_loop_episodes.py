"""The metrics of answers of several turns."""

from __future__ import annotations

from megatron_rl.loop.rollouts import describe_episodes
from megatron_rl.types import Episode, Group, Prompt, Rollout


def group(*episodes: Episode | None) -> Group:
    samples = [Rollout(3, 1, 2, 0, "stop", episode=episode) for episode in episodes]
    return Group(Prompt("uid", (1,), "question"), samples, None, 0)


def test_episodes_are_described_over_all_answers():
    groups = [
        group(Episode(1, 1, 0, 1.0), Episode(4, 9, 3, 0.5)),
        group(Episode(3, 5, 0, 2.5, fault="it broke down", num_abandoned=2), Episode(2, 3, 1, 1.0, num_tool_calls=2)),
    ]
    assert describe_episodes(groups) == {
        "environment/turns_mean": 2.5,
        "environment/turns_max": 4.0,
        "environment/tool_calls": 0.5,
        "environment/abandoned": 2.0,
        "environment/tool_errors": 1.0,
        "environment/failed": 0.25,
        "environment/step_s": 0.5,
    }


def test_answers_of_one_turn_have_no_such_metrics():
    assert describe_episodes([group(None, None)]) == {}


def test_agents_that_asked_nothing_have_waited_for_nothing():
    given = describe_episodes([group(Episode(0, 1, fault="it broke down"))])
    assert (given["environment/step_s"], given["environment/failed"]) == (0.0, 1.0)
