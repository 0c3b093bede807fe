"""Reward shaping that needs no text: from lengths and token ids.

Invariants: an abstention stays NaN, and leaves the lengths of its group too. What is a correct answer is judged by the
rewards as verified, whatever was shaped before. The order of the samples does not matter.

Shape letters: S samples, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.advantages import (
    CosineShaping,
    LengthNormalisedShaping,
    RepetitionShaping,
    ShapingConfig,
    SoftOverlongShaping,
)

Response = Sequence[int] | np.ndarray
"""Token ids after the prompt."""


def soft_overlong(lengths: np.ndarray, max_tokens: int, cache_tokens: int) -> np.ndarray:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), to be added to the reward, [S].

    Example:
        max 100, cache 20: 0 up to 80 tokens, -.5 at 90, -1 from 100 on.
    """
    return np.clip((max_tokens - cache_tokens - lengths) / cache_tokens, -1.0, 0.0)


def length_normalised(lengths: np.ndarray, correct: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """Kimi k1.5's length reward (Kimi team 2025, arXiv:2501.12599, section 2.3.3), to be added to the reward, [S].

    l = 0.5 - (length - shortest) / (longest - shortest) of the group: .5 for its shortest answer, -.5 for its longest.
    A wrong answer gets min(0, l): being short does not help it. All 0 where all lengths are equal.
    """
    num_groups = int(group_of.max()) + 1 if len(group_of) else 0
    longest_G, shortest_G = np.full(num_groups, -np.inf), np.full(num_groups, np.inf)
    np.maximum.at(longest_G, group_of, lengths)
    np.minimum.at(shortest_G, group_of, lengths)
    spread_S = (longest_G - shortest_G)[group_of]
    share_S = (lengths - shortest_G[group_of]) / np.where(spread_S > 0, spread_S, 1.0)
    reward_S = np.where(spread_S > 0, 0.5 - share_S, 0.0)
    return np.where(correct, reward_S, np.minimum(reward_S, 0.0))


def cosine(lengths: np.ndarray, correct: np.ndarray, cfg: CosineShaping) -> np.ndarray:
    """Cosine-scaled reward (Yeo et al. 2025, arXiv:2502.03373), in place of the reward, [S].

    From `at_zero` at length 0 to `at_max` at max_tokens along half a cosine, one pair for correct and one for wrong
    answers: the default makes correct answers better when short, and wrong ones better when long. `exceeding` from
    max_tokens on.
    """
    at_zero = np.where(correct, cfg.correct_at_zero, cfg.wrong_at_zero)
    at_max = np.where(correct, cfg.correct_at_max, cfg.wrong_at_max)
    reward_S = at_max + (at_zero - at_max) * (1 + np.cos(np.pi * lengths / cfg.max_tokens)) / 2
    return np.where(lengths >= cfg.max_tokens, cfg.exceeding, reward_S)


def repetition(responses: Sequence[Response], ngram_size: int, max_penalty: float) -> np.ndarray:
    """Penalty for repeated n-grams of token ids (Yeo et al. 2025, arXiv:2502.03373; this sum form: Open-R1), to be
    added to the reward, [S]: max_penalty (1 - distinct n-grams / n-grams); 0 for a response shorter than one.

    Example:
        tokens 1 2 1 2 1, n = 2: 12 21 12 21, half of them repeats, so max_penalty / 2.
    """
    return np.array([max_penalty * _repeated_share(np.asarray(r).tolist(), ngram_size) for r in responses], np.float64)


def _repeated_share(ids: list[int], ngram_size: int) -> float:
    total = len(ids) - ngram_size + 1
    if total <= 0:
        return 0.0
    return 1 - len(set(zip(*(ids[i:] for i in range(ngram_size))))) / total


@dataclass(frozen=True, slots=True)
class Answers:
    """What shaping knows about the scored samples."""

    rewards: np.ndarray
    """float64 [S], as verified."""
    lengths: np.ndarray
    group_of: np.ndarray
    responses: Sequence[Response] | None


SHAPINGS: dict[type, Callable[..., np.ndarray]] = {
    SoftOverlongShaping: lambda cfg, a, r: r + soft_overlong(a.lengths, cfg.max_tokens, cfg.cache_tokens),
    LengthNormalisedShaping: lambda cfg, a, r: (
        r + cfg.weight * length_normalised(a.lengths, a.rewards >= cfg.correct_threshold, a.group_of)
    ),
    CosineShaping: lambda cfg, a, r: cosine(a.lengths, a.rewards >= cfg.correct_threshold, cfg),
    RepetitionShaping: lambda cfg, a, r: r + repetition(a.responses, cfg.ngram_size, cfg.max_penalty),
}
"""One line a shaping, keyed by its config class: (cfg, answers, rewards so far [S]) -> rewards [S]."""


def shape_rewards(
    rewards: np.ndarray,
    lengths: np.ndarray,
    group_of: np.ndarray,
    responses: Sequence[Response] | None,
    configs: Sequence[ShapingConfig],
) -> np.ndarray:
    """Apply the shapings in order.

    Args:
        rewards: float64 [S], as verified; NaN for an abstention.
        lengths: int64 [S], response tokens.
        group_of: int64 [S].
        responses: token ids of each response; None when no `repetition` is among the configs.

    Returns:
        shaped rewards, float64 [S]; NaN where an abstention stood.

    Raises:
        ValueError: `repetition` without responses; `cosine` after another shaping, whose work it would undo.
    """
    for index, cfg in enumerate(configs):
        if isinstance(cfg, RepetitionShaping) and responses is None:
            raise ValueError("shaping repetition needs the token ids of the responses")
        if isinstance(cfg, CosineShaping) and index > 0:
            raise ValueError(
                f"shaping cosine takes the place of the reward and would undo {configs[index - 1].kind}: put it first"
            )
    scored = np.flatnonzero(~np.isnan(rewards))
    picked = None if responses is None else [responses[i] for i in scored]
    answers = Answers(rewards[scored], lengths[scored], group_of[scored], picked)
    shaped = answers.rewards
    for cfg in configs:
        shaped = SHAPINGS[type(cfg)](cfg, answers, shaped)
    result = np.full(len(rewards), np.nan)
    result[scored] = shaped
    return result
