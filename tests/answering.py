"""Answers as a verifier sees them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.types import Episode, Prompt, Rollout, TokenReward
from megatron_rl.verifiers.answer import Answer


def answered(
    prompt: Prompt,
    ids: Sequence[int],
    finish: str = "stop",
    episode: Episode | None = None,
    token_rewards: tuple[TokenReward, ...] = (),
    num_before: int | None = None,
) -> Answer:
    """
    Args:
        ids: the tokens of the response.
        num_before: the number of tokens before them, if they are not those of the prompt.
    """
    before = len(prompt.token_ids) if num_before is None else num_before
    size = len(ids)
    rollout = Rollout(before + size, before, size, 0, finish, token_rewards=token_rewards, episode=episode)
    return Answer(prompt, rollout, list(ids))
