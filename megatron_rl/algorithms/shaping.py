"""Reward shaping from lengths and from the share of repeated n-grams, which the verifiers count.

Invariants: an abstention stays NaN, and its length does not count in its group. Whether an answer is correct depends on
its verified reward, before any shaping. The order of the samples does not matter.

Shape letters: S samples, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.config.shaping import (
    CosineShaping,
    LengthNormalisedShaping,
    RepetitionShaping,
    ShapingConfig,
    SoftOverlongShaping,
)
from megatron_rl.types import Rollout, Verdict


def soft_overlong(lengths: np.ndarray, max_tokens: int, cache_tokens: int) -> np.ndarray:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), to be added to the reward, [S].

    Example:
        With max 100 and cache 20 it is 0 up to 80 tokens, -.5 at 90, and -1 from 100 on.
    """
    return np.clip((max_tokens - cache_tokens - lengths) / cache_tokens, -1.0, 0.0)


def length_normalised(lengths: np.ndarray, correct: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """Kimi k1.5's length reward (Kimi team 2025, arXiv:2501.12599, section 2.3.3), to be added to the reward, [S].

    l = 0.5 - (length - shortest) / (longest - shortest) in the group, which is .5 for its shortest answer and -.5 for
    its longest. A wrong answer has min(0, l), so that it gains nothing by being short. All are 0 if all lengths are
    equal.
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
    """Cosine-scaled reward (Yeo et al. 2025, arXiv:2502.03373), which replaces the reward, [S].

    It goes along half a cosine from `at_zero` at length 0 to `at_max` at max_tokens, with one pair of values for
    correct answers and one for wrong answers. From max_tokens on it is `exceeding`. The default values prefer short
    correct answers and long wrong answers.
    """
    at_zero = np.where(correct, cfg.correct_at_zero, cfg.wrong_at_zero)
    at_max = np.where(correct, cfg.correct_at_max, cfg.wrong_at_max)
    reward_S = at_max + (at_zero - at_max) * (1 + np.cos(np.pi * lengths / cfg.max_tokens)) / 2
    return np.where(lengths >= cfg.max_tokens, cfg.exceeding, reward_S)


def repeated_share(ids: Sequence[int], ngram_size: int) -> float:
    """The share of a response's n-grams of token ids that stand in it before: 1 - distinct n-grams / n-grams. It is 0
    for a response shorter than an n-gram.

    Example:
        The tokens 1 2 1 2 1 with n = 2 have the n-grams 12 21 12 21, and half of them are repetitions.
    """
    total = len(ids) - ngram_size + 1
    if total <= 0:
        return 0.0
    return 1 - len(set(zip(*(ids[i:] for i in range(ngram_size)), strict=False))) / total


@dataclass(frozen=True, slots=True)
class ShapingInputs:
    """The data of the scored samples that the shapings use."""

    rewards: np.ndarray
    """float64 [S], the verified rewards before any shaping."""
    lengths: np.ndarray
    """int64 [S], response tokens."""
    group_of: np.ndarray
    """int64 [S]."""
    repeated: Mapping[int, np.ndarray]
    """float64 [S], the share of repeated n-grams, by n."""


SHAPINGS: dict[type, Callable[..., np.ndarray]] = {
    SoftOverlongShaping: lambda cfg, a, r: r + soft_overlong(a.lengths, cfg.max_tokens, cfg.cache_tokens),
    LengthNormalisedShaping: lambda cfg, a, r: (
        r + cfg.weight * length_normalised(a.lengths, a.rewards >= cfg.correct_threshold, a.group_of)
    ),
    CosineShaping: lambda cfg, a, r: cosine(a.lengths, a.rewards >= cfg.correct_threshold, cfg),
    # Yeo et al. 2025, arXiv:2502.03373; the form as a sum is Open-R1's.
    RepetitionShaping: lambda cfg, a, r: r + cfg.max_penalty * a.repeated[cfg.ngram_size],
}
"""One line for each shaping: (its configuration, answers, rewards so far [S]) -> rewards [S]. The key is the class of
its configuration."""


def shape_rewards(
    rewards: np.ndarray,
    lengths: np.ndarray,
    group_of: np.ndarray,
    repeated: Mapping[int, np.ndarray],
    configs: Sequence[ShapingConfig],
) -> np.ndarray:
    """Apply the shapings in order.

    Args:
        rewards: float64 [S], the verified rewards; NaN for an abstention.
        lengths: int64 [S], response tokens.
        group_of: int64 [S].
        repeated: float64 [S], the share of repeated n-grams, for the n of each `repetition` among the configs.

    Returns:
        shaped rewards, float64 [S]; NaN for an abstention.

    Raises:
        ValueError: `cosine` comes after another shaping, which it would undo.
    """
    for index, cfg in enumerate(configs):
        if isinstance(cfg, CosineShaping) and index > 0:
            raise ValueError(
                f"shaping cosine replaces the reward and would undo {configs[index - 1].kind} before it; put it first"
            )
    scored = np.flatnonzero(~np.isnan(rewards))
    picked = {size: share[scored] for size, share in repeated.items()}
    answers = ShapingInputs(rewards[scored], lengths[scored], group_of[scored], picked)
    shaped = answers.rewards
    for cfg in configs:
        shaped = SHAPINGS[type(cfg)](cfg, answers, shaped)
    result = np.full(len(rewards), np.nan)
    result[scored] = shaped
    return result


def shape_verdicts(
    verdicts: Sequence[Sequence[Verdict]], groups: Sequence[Sequence[Rollout]], shaping: Sequence[ShapingConfig]
) -> list[list[Verdict]]:
    """The verdicts on whole groups with their shaped scores.

    Args:
        verdicts: one for each rollout of each group.
        groups: the rollouts of each group.
    """
    if not shaping:
        return [list(group) for group in verdicts]
    flat = [verdict for group in verdicts for verdict in group]
    scores = np.array([np.nan if verdict.score is None else verdict.score for verdict in flat], np.float64)
    lengths = np.array([rollout.num_response_tokens for group in groups for rollout in group], np.int64)
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    # A verdict without a score may lack the share: the process that counts it was lost.
    repeated = {
        size: np.array([verdict.repeated.get(size, np.nan) for verdict in flat]) for size in repetition_sizes(shaping)
    }
    shaped = shape_rewards(scores, lengths, group_of, repeated, shaping)
    numbers = iter(None if np.isnan(x) else x for x in shaped.tolist())
    return [[replace(verdict, shaped=next(numbers)) for verdict in group] for group in verdicts]


def repetition_sizes(shaping: Sequence[ShapingConfig]) -> tuple[int, ...]:
    """The n of the n-grams whose repetitions the shapings need."""
    return tuple(sorted({cfg.ngram_size for cfg in shaping if isinstance(cfg, RepetitionShaping)}))
