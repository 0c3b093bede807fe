"""The trainer's values of prefixes in a step."""

from __future__ import annotations

import numpy as np
from small_ports import SHAPE, config

from megatron_rl.loop.probes import with_utilities
from megatron_rl.loop.shares import batch_of
from megatron_rl.types import (
    FROM_PROMPT,
    NOT_JUDGED,
    UTILITY,
    Branch,
    Group,
    Prompt,
    Rollout,
    Rollouts,
    TokenReward,
    Tokens,
    Verdict,
)


class Policy:
    """Its log-prob of a sample is minus the sum of its actions' ids."""

    def score(self, shares):
        self.num_microbatches = [len(micro) for share in shares for micro in share.minibatches]
        return {
            int(index): -float(tokens.ids[tokens.action_mask].sum())
            for share in shares
            for index, tokens in ((share.index[i], share.tokens[i]) for i in range(len(share.names)))
        }


def group(number: int) -> Group:
    """Two answers, of which the second one has a passage; the right answer after it has the log-prob of its number."""
    payload = []

    def add(position=None, branch=None, ids=(0, 0, 0)) -> Rollout:
        rewards = () if position is None else (TokenReward(position, UTILITY, 0.0),)
        payload.append(
            Tokens(
                np.array([3, 3, *ids], np.int32),
                np.arange(2 + len(ids)) >= 2,
                np.zeros(2 + len(ids), np.float32),
                np.zeros(2 + len(ids), np.int32),
            )
        )
        verdict = NOT_JUDGED if branch else Verdict(float(len(payload) - 1), parts=(float(len(payload) - 1),))
        return Rollout(2 + len(ids), 2, len(ids), 0, "stop", token_rewards=rewards, branch=branch, verdict=verdict)

    prompt = Prompt(f"row {number}", (3, 3), "")
    rollouts, of_answers = [add(), add(position=3)], payload
    payload = []
    probes = [add(branch=FROM_PROMPT, ids=[4]), add(branch=Branch(1, 0), ids=[number])]
    return Group(prompt, rollouts, of_answers, 0, Group(prompt, probes, payload, 0))


def test_each_passage_gets_its_own_right_answers():
    cfg = config(
        rollout={
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_prompt_tokens": 8,
            "max_response_tokens": 8,
            "thinking": {"thought_tokens": 4, "response_tokens": 3},
            "prefix_values": {"by": "trainer", "force": "x"},
        },
        algorithm={"adv_estimator": {"kind": "grpo_process"}},
        policy={"parallel": {"data": 2}},
        balance={"max_tokens_per_microbatch": 24},
    )
    groups, policy = [group(number) for number in (1, 2, 3)], Policy()
    rollouts = Rollouts(groups, None, {"reward/mean": 0.5})
    given = with_utilities(cfg, SHAPE, policy, rollouts, step=7)
    utilities = [[r.value for s in group.rollouts for r in s.token_rewards] for group in given.groups]
    assert utilities == [[3.0], [2.0], [1.0]], "minus the number, minus -4"
    batch = batch_of(cfg, given, 7)
    assert batch.token_rewards.value.tolist() == [3.0, 2.0, 1.0]
    assert batch.token_rewards.sample.tolist() == [1, 3, 5], "the answers alone are samples of the step"
    assert given.metrics == {
        "reward/mean": 0.5,
        "passages/mean": 0.5,
        "passages/single": 1.0,
        "passages/utility_mean": 2.0,
        "passages/helpful": 1.0,
    }
    assert len(policy.num_microbatches) == 2, "both replicas"
    assert with_utilities(cfg, SHAPE, policy, rollouts, step=7).metrics == given.metrics, "a step that is begun again"
    assert with_utilities(cfg, SHAPE, policy, given, step=7) is given, "rows without a right answer"
