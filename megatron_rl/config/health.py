"""The names of the health rules. A run warns when one is broken, and `run.stop_on` makes it end there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

HealthRule = Literal[
    "jump",
    "no_signal",
    "no_score",
    "silent_reward",
    "one_reward",
    "entropy",
    "evaluation",
    "length",
    "thoughts",
    "duplicates",
    "no_calls",
    "failed_environments",
    "mismatch",
    "ratio",
    "still_weights",
    "untrained_tokens",
    "lag",
    "idle_engines",
    "slow_rank",
    "memory",
    "disk",
]

MEANINGS: Mapping[HealthRule, str] = {
    "jump": "the gradient norm is more than 20 times its median over the last steps",
    "no_signal": "no group of answers had a signal in two steps in a row, so that nothing was trained",
    "no_score": "no answer of a step scores above 0, in a run that learns from rewards",
    "silent_reward": "a reward scores no answer, cannot score some of them, or, as one of several, gives 0 to all of "
    "them in two steps",
    "one_reward": "one of several rewards makes 95 % of the differences between answers in five steps in a row",
    "entropy": "the entropy has fallen to a tenth within the last 50 steps, and the reward has not risen meanwhile",
    "evaluation": "the 95 % interval of the held-out accuracy is below the one of an earlier step",
    "length": "more than half of the answers end at the length limit in three steps in a row",
    "thoughts": "the budget ends the reasoning of more than half of the answers in three steps in a row",
    "duplicates": "more than a quarter of the answers of 64 tokens or more equal another answer to their prompt",
    "no_calls": "no answer has called a tool in five steps in a row of a run with tools",
    "failed_environments": "environments of answers failed, also when they began again",
    "mismatch": "trainer and engine differ five times as much as 50 steps ago, and by 1e-4 nats or more",
    "ratio": "the ratio differs from 1 by more than 1 % although the weights are the ones that gave logp_old",
    "still_weights": "with `policy.optimizer.rounding: nearest` an update changes less than 2 % of the weights, and "
    "the reward has not risen within the last 50 steps",
    "untrained_tokens": "tokens were sampled whose embeddings no training has moved",
    "lag": "the answers are as old as `rollout.max_lag` allows in five steps in a row",
    "idle_engines": "the engines have no request for 80 % of the time in five steps in a row of an asynchronous run",
    "slow_rank": "one trainer rank is 1.5 times as slow as the median rank in five steps in a row",
    "memory": "a process has grown by a tenth of the machine's memory within the last 50 steps, or what sleeping "
    "engines keep on a GPU by 4 GB",
    "disk": "at the pace of the last steps the disk of the run's folder is full in fewer than 50 steps",
}
"""When each rule is broken."""

assert set(MEANINGS) == set(get_args(HealthRule))
