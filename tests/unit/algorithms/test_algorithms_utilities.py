"""Values and utilities of passages, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_rl.algorithms.utilities import prefix_value, settle_branches, settle_probes
from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.types import FROM_PROMPT, UTILITY, Branch, Group, Prompt, Rollout, TokenReward, Verdict

CFG = PrefixValues(rollouts=2)


def sample(reward: float | None, *positions: int, branch: Branch | None = None) -> Rollout:
    given = tuple(TokenReward(position, UTILITY, 0.0) for position in positions)
    verdict = Verdict(reward, "" if reward is not None else "nothing to say")
    return Rollout(30, 4, 26, 0, "stop", token_rewards=given, branch=branch, verdict=verdict)


def settled(*samples: Rollout, cfg: PrefixValues = CFG) -> list[list[float]]:
    prompt, answers = Prompt("row", (1,), "q"), [one for one in samples if one.branch is None]
    branches = Group(prompt, [one for one in samples if one.branch is not None], None, 0)
    group = settle_branches(Group(prompt, answers, None, 0, branches), cfg)
    assert group.continuations is None
    return [[given.value for given in sample.token_rewards] for sample in group.rollouts]


def after(number: int, passage: int, *rewards: float | None) -> list[Rollout]:
    return [sample(reward, branch=Branch(number, passage)) for reward in rewards]


def test_golden_values():
    """V of the prompt is 1/2. The first answer has 2/3, 1 and 1 after its passages, the second one 0 after its only
    one, and the third has no passage."""
    given = settled(
        sample(1.0, 9, 15, 20),
        sample(0.0, 12),
        sample(0.5),
        *after(0, 0, 1.0, 1.0, 0.0),
        *after(0, 1, 1.0, 1.0),
        *after(0, 2, 1.0),
        *after(1, 0, 0.0, 0.0),
    )
    assert given == [pytest.approx([2 / 3 - 1 / 2, 1 / 3, 0.0]), [-0.5], []]


def test_samples_without_a_reward_do_not_count():
    """A passage of which nothing is known adds nothing; of a group of which nothing is known no passage has a
    reward."""
    assert settled(sample(1.0, 9, 15), sample(None), *after(0, 0, None, None), *after(0, 1, None, 0.5)) == [
        [0.0, -0.5],
        [],
    ]
    assert settled(sample(None, 9), *after(0, 0, 1.0)) == [[]]


def test_other_rewards_stay_and_the_options_hold():
    one = sample(1.0, 9, 15)
    one = replace(one, token_rewards=(TokenReward(5, "environment", 2.0), *one.token_rewards))
    cfg = PrefixValues(rollouts=1, positive_only=True, idle_cost=0.5, max_tokens=16)
    # The second passage has 6 tokens of 16, and changes nothing.
    given = settled(one, sample(0.0), *after(0, 0, 1.0), *after(0, 1, 1.0), cfg=cfg)
    assert given == [pytest.approx([2.0, 0.5, -0.5 * 6 / 16]), []]


def test_log_probs_of_right_answers():
    """Two answers are right, of one and of two tokens. V of the prompt is the better mean, -2 / 2; after the first
    passage of the first answer it is -0.25, after the second one the floor; the second answer has -3."""
    one, other = sample(1.0, 9, 15), sample(0.0, 12)
    told = {
        FROM_PROMPT: (-3.0, -2.0),
        Branch(0, 0): (-0.25, -8.0),
        Branch(0, 1): (-90.0, -90.0),
        Branch(1, 0): (-3.0, -8.0),
    }
    probes = [Rollout(20, 10, length, 0, "stop", branch=branch) for branch in told for length in (1, 2)]
    prompt = Prompt("row", (1,), "q")
    group = Group(prompt, [one, other], None, 0, Group(prompt, probes, None, 0))
    logps = [logp for given in told.values() for logp in given]
    settled = settle_probes(group, logps, PrefixValues(by="trainer"))
    given = [[reward.value for reward in rollout.token_rewards] for rollout in settled.rollouts]
    assert given == [[0.75, -9.75], [-2.0]] and settled.continuations is None


def test_values_of_right_answers():
    assert prefix_value([-2.0, -2.0], [1, 2], PrefixValues()) == -1
    assert prefix_value([-30.0], [2], PrefixValues()) == -10
    probability = PrefixValues(scale="probability", several="logsumexp")
    assert prefix_value([-2.0, -2.0], [1, 2], probability) == pytest.approx(2 * math.exp(-2))
    assert prefix_value([-math.inf], [2], probability) == 0
