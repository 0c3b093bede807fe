from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from shares import TrainSample, share_of

from megatron_rl.actor.credit import require_finite_rewards
from megatron_rl.actor.packing import pack
from megatron_rl.types import TokenRewards, Tokens

TOKENS = Tokens(np.arange(3, dtype=np.int32), np.array([0, 1, 1], bool), np.zeros(3, np.float32), np.zeros(3, np.int32))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_sample(bad):
    rewards = TokenRewards(np.array([1, 0]), np.array([1, 1]), np.array([bad, 1.0]))
    share = replace(
        share_of([[[TrainSample(f"row {i}", TOKENS, 0.0, 1.0, i) for i in range(2)]]]),
        token_rewards=rewards,
    )
    with pytest.raises(ValueError, match="sample row 1: .*the reward"):
        require_finite_rewards(batch for rows in pack(share) for batch in rows)
