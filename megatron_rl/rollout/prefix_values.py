"""What a passage of a thought is worth: how much more probable it makes the right answer, by the policy itself.

The value of the first i passages is V_i = mean log P(answer tokens | prompt, passages, force), and the utility of
passage i is U_i = V_i - V_(i-1). V_0 is that of the prompt alone. The engine computes the values as soon as an answer
is complete, while it generates others: for each token of the right answer it is asked for one token after everything
before, and gives the log-prob of the one that is wanted. The prefix cache holds what these requests share with the
answer.

Invariants (tests/unit/rollout): the utilities of a thought, not clipped, add up to the last value minus the first; a
value is never below the floor; a thought without passages, and a row without an answer, have no rewards.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from pathlib import Path

from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.rollout.passages import split, token_texts
from megatron_rl.rollout.program import find_delimiter
from megatron_rl.rollout.vocabulary import load_tokenizer
from megatron_rl.types import Prompt, Sample, TokenReward, Tokens

KIND = "utility"

Score = Callable[[Sequence[tuple[list[int], int]]], Awaitable[list[float]]]
"""Pairs of tokens and one more token -> the log-prob of this one after the others."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A right answer as tokens."""

    before: tuple[int, ...]
    """The tokens of the forced text."""
    ids: tuple[int, ...]


class PrefixValuer:
    """
    Args:
        folder: the model's.
        delimiter: the tokens that end a thought.
    """

    def __init__(self, folder: Path, cfg: PrefixValues, delimiter: Sequence[int]) -> None:
        self._cfg, self._delimiter, self._tokenizer = cfg, tuple(delimiter), load_tokenizer(folder)

    def wanted(self, prompt: Prompt) -> list[Wanted]:
        """The right answers of a row; none if it has none.

        Raises:
            ValueError: an answer is neither text nor a number, or it has no tokens.
        """
        given = prompt.columns.get(self._cfg.column)
        answers = given if isinstance(given, list | tuple) else [] if given is None else [given]
        return [self._tokens(prompt, answer) for answer in answers]

    def _tokens(self, prompt: Prompt, answer: object) -> Wanted:
        if not isinstance(answer, str | Number) or isinstance(answer, bool):
            raise ValueError(
                f"prompt {prompt.uid}: rollout.prefix_values needs text or a number in the column "
                f"`{self._cfg.column}`, not {answer!r}"
            )
        # Together, because tokens of words take the space before them with them.
        force, text = self._cfg.force, str(answer)
        encoded = self._tokenizer.encode(force + text, add_special_tokens=False)
        num_before = sum(end <= len(force) for _, end in encoded.offsets)
        if not text.strip() or num_before == len(encoded.ids):
            raise ValueError(f"prompt {prompt.uid}: the answer {answer!r} of rollout.prefix_values has no tokens")
        return Wanted(tuple(encoded.ids[:num_before]), tuple(encoded.ids[num_before:]))

    def passages(self, sample: Sample, tokens: Tokens) -> list[range]:
        """The passages of an answer's thought, as indices of `tokens`; none if it has no thought."""
        start = sample.num_prompt_tokens
        response = tokens.ids[start:].tolist()
        end = find_delimiter(response, self._delimiter)
        thought = response if end is None else response[:end]
        cfg = self._cfg
        found = split(token_texts(self._tokenizer, thought), cfg.markers, cfg.min_tokens, cfg.max_tokens)
        return [range(start + passage.start, start + passage.stop) for passage in found]

    async def rewarded(
        self, prompt: Prompt, sample: Sample, tokens: Tokens, score: Score, empty: Awaitable[float] | None = None
    ) -> Sample:
        """The sample with the rewards of its passages.

        Args:
            empty: the value of the prompt alone, if somebody has it.
        """
        wanted, passages = self.wanted(prompt), self.passages(sample, tokens)
        if not wanted or not passages:
            return sample
        ids = tokens.ids.tolist()
        prefixes = [ids[: passage.stop] for passage in passages]
        first = [ids[: sample.num_prompt_tokens]] if empty is None else []
        values = await self.values([*first, *prefixes], wanted, score)
        if empty is not None:
            values = [await empty, *values]
        rewards = utilities(values, [len(passage) for passage in passages], self._cfg)
        given = [TokenReward(passage.stop - 1, KIND, u) for passage, u in zip(passages, rewards, strict=True)]
        return replace(sample, token_rewards=(*sample.token_rewards, *given))

    async def values(self, prefixes: Sequence[list[int]], wanted: Sequence[Wanted], score: Score) -> list[float]:
        """The value of each prefix."""
        pairs = [
            ([*prefix, *answer.before, *answer.ids[:j]], answer.ids[j])
            for prefix in prefixes
            for answer in wanted
            for j in range(len(answer.ids))
        ]
        logps = iter(await score(pairs))
        means = [[math.fsum(next(logps) for _ in answer.ids) / len(answer.ids) for answer in wanted] for _ in prefixes]
        return [max(together(of_answers, self._cfg.several), self._cfg.floor) for of_answers in means]


def together(means: Sequence[float], several: str) -> float:
    """The value from those of several right answers.

    Example: -1 and -2 give -1 with `max`, and -0.687 with `logsumexp`.
    """
    largest = max(means)
    if several == "max" or largest == -math.inf:
        return largest
    return largest + math.log(math.fsum(math.exp(mean - largest) for mean in means))


def utilities(values: Sequence[float], lengths: Sequence[int], cfg: PrefixValues) -> list[float]:
    """The reward of each passage.

    Args:
        values: V_0 to V_n.
        lengths: the number of tokens of each of the n passages.

    Example: the values -3, -1, -1.5 give the rewards 2 and -0.5; with positive_only 2 and 0.
    """
    rewards = []
    for before, after, length in zip(values, values[1:], lengths, strict=True):
        change = after - before
        reward = max(change, 0.0) if cfg.positive_only else change
        if cfg.clip is not None:
            reward = min(max(reward, -cfg.clip), cfg.clip)
        if abs(change) < cfg.idle_below:
            reward -= cfg.idle_cost * length / cfg.max_tokens
        rewards.append(reward)
    return rewards
