"""Each data-parallel rank gets its own samples, and no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from small_models import model
from small_ports import config

from megatron_rl.balance import plan_microbatches
from megatron_rl.config.balance import BalanceConfig
from megatron_rl.config.policy import ParallelConfig
from megatron_rl.loop.shares import batch_of, deal
from megatron_rl.types import (
    Credit,
    Episode,
    Group,
    Minibatches,
    Picture,
    Prompt,
    Rollout,
    Rollouts,
    StepBatch,
    TokenRewards,
    Verdict,
)

SHAPE = model("qwen3", 1, 8, 2, 2, 4, 8, 32)


def test_every_active_sample_is_in_one_share_with_its_own_tokens_and_numbers():
    rng = np.random.default_rng(0)
    groups = []
    for g in range(7):
        samples = [Rollout(int(n), 2, int(n) - 2, 0, "stop") for n in rng.integers(4, 40, size=3)]
        groups.append(Group(Prompt(f"row {g}", (5, 6), ""), samples, [f"tokens {g}.{i}" for i in range(3)], version=0))
    batch = StepBatch.of_groups(groups, version=3)
    active = np.arange(21) // 3 != 1  # the second group has no signal
    parallel = ParallelConfig(data=2)
    plan = plan_microbatches(
        batch, active, SHAPE, parallel, BalanceConfig(max_tokens_per_microbatch=64), Minibatches(2)
    )

    # Of the rewards at tokens, two are of one sample, one is of a sample that is not planned.
    rewards = TokenRewards(np.array([20, 4, 0, 20]), np.array([3, 2, 1, 2]), np.array([0.5, 9.0, 0.25, -1.0]))
    credit = Credit(np.arange(21) / 10, active, rewards)
    seen, seen_rewards = {}, []
    for rank, share in enumerate(deal(batch, plan, 2, np.arange(21) / 100, credit)):
        own = share.token_rewards
        seen_rewards += zip(share.index[own.sample].tolist(), own.position.tolist(), own.value.tolist(), strict=True)
        assert (share.version, share.denominators, share.alignment) == (3, plan.denominators, plan.alignment)
        assert len(share.tokens) == sum(len(micro) for mini in share.minibatches for micro in mini), "and no others"
        for mine, planned in zip(share.minibatches, plan.minibatches, strict=True):
            assert tuple(tuple(share.index[list(micro)]) for micro in mine) == planned[rank]
            for sample in (sample for micro in mine for sample in micro):
                assert share.tokens[sample] not in seen, "each sample is in one share once"
                numbers = (share.names[sample], share.index[sample], share.advantages[sample], share.weights[sample])
                seen[share.tokens[sample]] = numbers
    assert sorted(seen_rewards) == [(0, 1, 0.25), (20, 2, -1.0), (20, 3, 0.5)]
    assert seen == {
        f"tokens {g}.{i}": (f"row {g}, answer {i}", 3 * g + i, (3 * g + i) / 10, (3 * g + i) / 100)
        for g in range(7)
        if g != 1
        for i in range(3)
    }


def test_a_step_knows_the_patches_of_its_samples():
    """An answer of several turns has the images of its environment, too."""
    shown, bare = Prompt("a", (1,), "", pictures=(Picture("x", 4, 4), Picture("y", 2, 6))), Prompt("b", (1,), "")
    answer = Rollout(6, 1, 5, 0, "stop", verdict=Verdict(1.0, parts=(1.0,)))
    seen = replace(answer, episode=Episode(2, 4, patches=(16,)))
    groups = [Group(shown, [answer, answer], [None] * 2, 0), Group(bare, [answer, seen], [None] * 2, 0)]
    batch = batch_of(config(), Rollouts(groups, None, {}), 0)
    assert batch.patches == [(16, 12), (16, 12), (), (16,)]
    without = replace(groups[1], rollouts=[answer] * 2)
    assert type(batch_of(config(), Rollouts([without], None, {}), 0)) is StepBatch
