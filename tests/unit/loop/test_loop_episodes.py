"""The metrics of answers of several turns."""

from __future__ import annotations

import pytest

from megatron_rl.loop.health.answers import FailedEnvironments
from megatron_rl.loop.rollouts import describe_episodes
from megatron_rl.types import Episode, Group, Prompt, Rollout


def group(*episodes: Episode | None) -> Group:
    samples = [Rollout(3, 1, 2, 0, "stop", episode=episode) for episode in episodes]
    return Group(Prompt("uid", (1,), "question"), samples, None, 0)


def test_episodes_are_described_over_all_answers():
    groups = [
        group(Episode(1, 1, (), 1.0), Episode(4, 9, ("raised", "raised", "malformed"), 0.5)),
        group(
            Episode(3, 5, (), 2.5, fault="it broke down", num_abandoned=2, num_failed=1),
            Episode(2, 3, ("arguments",), 1.0, num_tool_calls=2),
        ),
    ]
    assert describe_episodes(groups) == {
        "environment/turns_mean": 2.5,
        "environment/turns_max": 4.0,
        "environment/tool_calls": 0.5,
        "environment/abandoned": 2.0,
        "environment/retried": 0.0,
        "environment/conversations": 1.0,
        "environment/tool_errors": 1.0,
        "environment/tool_errors/unclosed": 0.0,
        "environment/tool_errors/malformed": 0.25,
        "environment/tool_errors/unknown_tool": 0.0,
        "environment/tool_errors/arguments": 0.25,
        "environment/tool_errors/raised": 0.5,
        "environment/tool_errors/timed_out": 0.0,
        "environment/failed": 0.25,
        "environment/began_again": 1.0,
        "environment/step_s": 0.5,
    }


def test_answers_of_one_turn_have_no_such_metrics():
    assert describe_episodes([group(None, None)]) == {}


def test_agents_that_asked_nothing_have_waited_for_nothing():
    given = describe_episodes([group(Episode(0, 1, fault="it broke down"))])
    assert (given["environment/step_s"], given["environment/failed"]) == (0.0, 1.0)


def test_an_answer_with_several_conversations_counts_once():
    parts = [
        Rollout(10, 4, 6, 2, "stop", episode=Episode(1, 4, conversation=0, continues=True)),
        Rollout(20, 15, 5, 1, "stop", episode=Episode(2, 15, ("raised",), 1.5, num_tool_calls=3, conversation=1)),
    ]
    one, other = Rollout(9, 4, 5, 0, "length", episode=Episode(1, 4)), Prompt("uid", (1,), "question")
    whole, alone = Group(other, [*parts, one], None, 0).answers
    assert (whole.num_response_tokens, whole.num_actions, whole.num_thought_tokens, whole.finish) == (11, 11, 3, "stop")
    assert (whole.episode.num_turns, whole.episode.tool_errors, whole.episode.num_tool_calls) == (3, ("raised",), 3)
    assert alone is one
    told = describe_episodes([Group(other, [*parts, one], None, 0)])
    assert (told["environment/turns_mean"], told["environment/conversations"]) == (2.0, 1.5)


class Warnings:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def warn(self, sentence: str, rule: str) -> None:
        self.told.append((sentence, rule))


def test_failed_environments_are_told_by_cause_and_machine_and_too_many_end_the_run():
    whole = Episode(1, 1)
    down, lost = Episode(1, 1, fault="the server is down", host="a"), Episode(0, 1, fault="the disk is full", host="b")
    failed, sink = FailedEnvironments(0.5), Warnings()
    for _ in range(3):
        failed.count([group(whole, whole, whole, down), group(whole, down, lost, whole)], sink)
    failed.count([group(whole)], sink)
    failed.count([group(whole, down)], sink)
    assert [rule for _, rule in sink.told] == ["failed_environments"] * 3, "after 1 and 2 steps in a row, and anew"
    assert sink.told[0][0] == (
        "the environments of 3 of 8 answers failed (a: 2, b: 1), also when they began again; the most frequent causes "
        "are: the server is down (2 times); the disk is full (1 times)"
    )
    with pytest.raises(ValueError, match=r"of 2 of 3 answers failed .*raise rollout.environment.max_failed \(0.5\)"):
        failed.count([group(whole, down, lost)], sink)
