from __future__ import annotations

from dataclasses import replace

import pytest
from small_ports import PROMPTS, World, config

from megatron_rl.algorithms.utilities import settle_branches
from megatron_rl.loop.health.answers import UnsplitThoughts
from megatron_rl.loop.rollouts import describe_passages, describe_verified
from megatron_rl.types import Branch, Group, Prompt, Rollout, TokenReward


def group(*utilities: list[float]) -> Group:
    samples = []
    for own in utilities:
        rewards = [TokenReward(i, "utility", value) for i, value in enumerate(own)]
        samples.append(Rollout(9, 1, 8, 0, "stop", token_rewards=(*rewards, TokenReward(8, "environment", 7.0))))
    return Group(Prompt("row", (1,), "question"), samples, None, 0)


def test_passages_are_described_over_all_answers():
    assert describe_passages([group([1.0, -0.5, 0.0], []), group([0.5])]) == {
        "passages/mean": pytest.approx(4 / 3),
        "passages/single": pytest.approx(2 / 3),
        "passages/utility_mean": pytest.approx(0.25),
        "passages/helpful": pytest.approx(0.5),
    }
    assert describe_passages([group([])]) == {"passages/mean": 0.0, "passages/single": 1.0}


class Branching(World):
    """Each answer has one passage, and two others go on from it."""

    def groups(self, prompts, num_samples, version):
        return [self.branching(group, num_samples, version) for group in super().groups(prompts, num_samples, version)]

    def branching(self, group, num_samples, version):
        rewards = (TokenReward(2, "utility", 0.0),)
        [others] = super().groups([group.prompt], 2 * num_samples, version)
        branches = [replace(rollout, branch=Branch(i // 2, 0)) for i, rollout in enumerate(others.rollouts)]
        own = [replace(rollout, token_rewards=rewards) for rollout in group.rollouts]
        return replace(group, rollouts=own, continuations=replace(others, rollouts=branches))


def test_answers_that_go_on_from_passages_value_them():
    """The answers of a group have the rewards 1 and 0, and the ones after their passages 1, 0 and 1, 1."""
    world = Branching(lambda group, i: [[1.0, 0.0], [1.0, 0.0, 1.0, 1.0]][group][i])
    world.version = 0
    cfg = config(
        rollout={
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_prompt_tokens": 8,
            "max_response_tokens": 8,
            "prefix_values": {"rollouts": 2},
        },
        algorithm={"adv_estimator": {"kind": "grpo_process"}},
    )
    groups = world.groups(PROMPTS[:4], 2, 0)
    for i, group in enumerate(groups):
        judged, _ = world.judge([group, group.continuations])
        groups[i] = settle_branches(replace(judged[0], continuations=judged[1]), cfg.rollout.prefix_values)
    metrics = describe_verified(cfg, groups)
    for group in groups:
        assert [sample.verdict.score for sample in group.rollouts] == [1.0, 0.0]
        assert [[given.value for given in sample.token_rewards] for sample in group.rollouts] == [[0.0], [0.5]]
    assert (metrics["rollout/num_samples"], metrics["reward/exact_answer/mean"]) == (8, 0.5)
    assert metrics["passages/utility_mean"] == 0.25


def test_markers_that_never_occur_are_told_in_the_first_step():
    world, thoughts = World(), UnsplitThoughts()
    thoughts.count({"passages/single": 0.75}, world)
    thoughts.count({"passages/single": 1.0}, world)
    [warning] = world.warnings
    assert warning.startswith("75% of the answers have at most one passage of reasoning")
    later = UnsplitThoughts()
    later.count({"passages/single": 0.5}, world)
    later.count({"passages/single": 1.0}, world)
    UnsplitThoughts().count({}, world)
    assert len(world.warnings) == 1
