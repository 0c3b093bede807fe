"""The reward that an answer's environment gave while the answer was generated.

Invariant (tests/unit/verifiers): an answer without a reward of its environment is an abstention, never the score 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from megatron_rl.config.rewards import EnvironmentReward
from megatron_rl.types import LARGEST_SCORE, Tokenizer, Verdict
from megatron_rl.verifiers.answer import Answer


class EnvironmentVerifier:
    """Adds the rewards of the turns. `RewardSet` leaves out answers whose environment failed."""

    def __init__(self, cfg: EnvironmentReward, tokenizer: Tokenizer, delimiter: str) -> None:
        pass

    def score(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [_verdict(answer) for answer in answers]


def _verdict(answer: Answer) -> Verdict:
    given = [reward.value for reward in answer.rollout.token_rewards if reward.kind == "environment"]
    if not given:
        return Verdict(None, "the environment gave no reward")
    total = fsum(given)  # each is at most LARGEST_SCORE
    if abs(total) > LARGEST_SCORE:
        return Verdict(None, f"the rewards of the turns add up to more than {LARGEST_SCORE:g}", failed=True)
    return Verdict(total)
