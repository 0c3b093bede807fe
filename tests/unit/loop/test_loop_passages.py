from __future__ import annotations

import pytest
from small_ports import PROMPTS, World, config

from megatron_rl.algorithms.utilities import settle
from megatron_rl.loop.passages import UnsplitThoughts, describe_passages
from megatron_rl.loop.rollouts import describe_verified
from megatron_rl.types import Branch, Group, Prompt, Sample, TokenReward


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


class Branching(World):
    """Each answer has one passage, and two samples that go on from it."""

    def groups(self, prompts, num_samples, version):
        groups = super().groups(prompts, num_samples, version)
        for group in groups:
            for sample in group.samples:
                sample.token_rewards = (TokenReward(2, "utility", 0.0),)
            [others] = super().groups([group.prompt], 2 * num_samples, version)
            for i, sample in enumerate(others.samples):
                sample.branch = Branch(i // 2, 0)
            group.samples += others.samples
        return groups


def test_samples_that_go_on_from_passages_value_them_and_leave_the_step():
    """The answers of a group have the rewards 1 and 0, and the samples after their passages 1, 0 and 1, 1."""
    world = Branching(lambda group, i: [1.0, 0.0, 1.0, 0.0, 1.0, 1.0][i])
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
    world.judge(groups)
    settle(groups, cfg.rollout.prefix_values)
    metrics = describe_verified(cfg, groups)
    for group in groups:
        assert [sample.verdict.score for sample in group.samples] == [1.0, 0.0]
        assert [[given.value for given in sample.token_rewards] for sample in group.samples] == [[0.0], [0.5]]
    assert (metrics["rollout/num_samples"], metrics["reward/exact_answer/mean"]) == (8, 0.5)
    assert metrics["passages/utility_mean"] == 0.25


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
