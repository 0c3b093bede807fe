"""What a passage of a thought is worth: how much more probable it makes the right answer, by the policy itself.

The value of the first i passages is V_i = mean log P(answer tokens | prompt, passages, force), and the utility of
passage i is U_i = V_i - V_(i-1). V_0 is the value of the prompt alone. The engine computes the values as soon as an
answer is complete, while it generates others: each prefix with a right answer is a request for the log-probs of its
last tokens. The prefix cache holds what these requests share with the answer.

With `by: trainer` the engine only puts a right answer after each prefix, so that the trainer tells its log-prob. With
`rollouts` it continues the answer from the end of each passage, and the values are the verdicts on these answers. Both
are a group of their own (`Group.continuations`); algorithms/utilities.py computes the rewards from it.

Invariants (tests/unit/rollout): a thought without passages, and a row without an answer, have no rewards; a
continuation begins with the tokens up to the end of its passage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from megatron_rl.algorithms.utilities import prefix_value, utilities
from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.rollout.coroutine import Coroutine
from megatron_rl.rollout.program import Samples, find_delimiter
from megatron_rl.rollout.programs.passages import chapters, split, token_texts
from megatron_rl.rollout.vocabulary import load_tokenizer
from megatron_rl.types import FROM_PROMPT, UTILITY, Branch, Prompt, Rollout, TokenReward, Tokens

Score = Callable[[Sequence[tuple[Sequence[int], int]]], Coroutine[list[Sequence[float]]]]
"""Tokens and a number n -> the log-probs of the last n tokens, each given the tokens before it."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """A prefix of an answer, from which further answers are sampled."""

    sample: int
    """The number of the answer within its group."""
    tokens: Tokens
    length: int
    """The number of the tokens that are kept, prompt included."""
    rollout: int
    """The number of the new answer among those from this beginning."""


GoOn = Callable[[Prompt, Sequence[Beginning]], Coroutine[Samples]]
"""A prompt and beginnings of answers to it -> one answer for each."""


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
        delimiter: the tokens that end a thought; answers of several turns need none.
        score, go_on: what the engine does for it.
    """

    def __init__(self, folder: Path, cfg: PrefixValues, delimiter: Sequence[int], score: Score, go_on: GoOn) -> None:
        self._cfg, self._delimiter, self._tokenizer = cfg, tuple(delimiter), load_tokenizer(folder)
        self._score, self._go_on = score, go_on

    def wanted(self, prompt: Prompt) -> list[Wanted]:
        """The right answers of a row; none if it has none.

        Raises:
            ValueError: an answer is neither text nor a number, or it has no tokens or too many.
        """
        try:
            return [self._tokens(answer) for answer in self._cfg.answers(prompt.columns)]
        except ValueError as error:
            raise ValueError(f"prompt {prompt.uid}: {error}") from None

    def _tokens(self, text: str) -> Wanted:
        # Together, because tokens of words take the space before them with them.
        force = self._cfg.force
        encoded = self._tokenizer.encode(force + text, add_special_tokens=False)
        num_before = sum(end <= len(force) for _, end in encoded.offsets)
        if num_before == len(encoded.ids):
            raise ValueError(f"the answer {text!r} of rollout.prefix_values has no tokens")
        if len(encoded.ids) > self._cfg.forced_tokens:
            raise ValueError(
                f"`force` and the answer {text[:40]!r} have {len(encoded.ids)} tokens, above "
                f"rollout.prefix_values.forced_tokens = {self._cfg.forced_tokens}; raise it"
            )
        return Wanted(tuple(encoded.ids[:num_before]), tuple(encoded.ids[num_before:]))

    def passages(self, rollout: Rollout, tokens: Tokens) -> list[range]:
        """The passages of an answer's thought, as indices of `tokens`; none if it has no thought. The passages of an
        answer of several turns are its turns."""
        if rollout.episode is not None:
            return chapters(tokens.action_mask)
        start, cfg = rollout.num_prompt_tokens, self._cfg
        response = tokens.ids[start:].tolist()
        end = find_delimiter(response, self._delimiter)
        sampled = np.flatnonzero(tokens.action_mask[start:][:end])
        # What is forced to end a thought is not a part of it.
        thought = response[: sampled[-1] + 1] if len(sampled) else []
        found = split(token_texts(self._tokenizer, thought), cfg.markers, cfg.min_tokens, cfg.max_tokens)
        return [range(start + passage.start, start + passage.stop) for passage in found]

    def rewarded(self, prompt: Prompt, samples: Samples) -> Coroutine[tuple[Samples, Samples]]:
        """The answers to a prompt with the rewards of their passages, and no continuations. With `rollouts` or `by:
        trainer` the rewards are still 0, and the continuations will tell them.

        Raises:
            ValueError: see `wanted`.
        """
        branching = self._cfg.rollouts is not None
        wanted = [] if branching else self.wanted(prompt)
        passages = [self.passages(*sample) if branching or wanted else [] for sample in samples]
        if not any(passages):
            return samples, []
        if branching or self._cfg.by == "trainer":
            others = (
                (yield from self._branches(prompt, samples, passages))
                if branching
                else (self._probes(prompt, samples, passages, wanted))
            )
            return [
                _with_rewards(*sample, own, [0.0] * len(own)) for sample, own in zip(samples, passages, strict=True)
            ], others
        prefixes = [list(prompt.token_ids)]
        for (_, tokens), own in zip(samples, passages, strict=True):
            ids = tokens.ids.tolist()
            prefixes += [ids[: passage.stop] for passage in own]
        empty, *rest = yield from self.values(prefixes, wanted)
        values, found = iter(rest), []
        for sample, own in zip(samples, passages, strict=True):
            rewards = utilities([empty, *islice(values, len(own))], [len(passage) for passage in own], self._cfg)
            found.append(_with_rewards(*sample, own, rewards))
        return found, []

    def _probes(
        self, prompt: Prompt, samples: Samples, passages: Sequence[Sequence[range]], wanted: Sequence[Wanted]
    ) -> Samples:
        probes = [probe(prompt.token_ids, FROM_PROMPT, answer) for answer in wanted]
        for i, ((_, tokens), own) in enumerate(zip(samples, passages, strict=True)):
            for k, passage in enumerate(own):
                prefix = tokens.ids[: passage.stop].tolist()
                probes += [probe(prefix, Branch(i, k), answer) for answer in wanted]
        return probes

    def _branches(self, prompt: Prompt, samples: Samples, passages: Sequence[Sequence[range]]) -> Coroutine[Samples]:
        branches, beginnings = [], []
        for i, ((_, tokens), own) in enumerate(zip(samples, passages, strict=True)):
            for k, passage in enumerate(own):
                for j in range(self._cfg.rollouts or 0):
                    branches.append(Branch(i, k))
                    beginnings.append(Beginning(i, tokens, passage.stop, j))
        others = yield from self._go_on(prompt, beginnings)
        return [
            (replace(rollout, branch=branch), tokens)
            for branch, (rollout, tokens) in zip(branches, others, strict=True)
        ]

    def values(self, prefixes: Sequence[list[int]], wanted: Sequence[Wanted]) -> Coroutine[list[float]]:
        """The value of each prefix."""
        texts = [((*prefix, *answer.before, *answer.ids), len(answer.ids)) for prefix in prefixes for answer in wanted]
        different = list(dict.fromkeys(texts))  # the thoughts of a group may begin alike
        scored = yield from self._score(different)
        logp_of = dict(zip(different, map(math.fsum, scored), strict=True))
        lengths = [len(answer.ids) for answer in wanted]
        return [
            prefix_value([logp_of[text] for text in texts[i : i + len(wanted)]], lengths, self._cfg)
            for i in range(0, len(texts), len(wanted))
        ]


def probe(prefix: Sequence[int], branch: Branch, answer: Wanted) -> tuple[Rollout, Tokens]:
    """A right answer after a prefix, whose log-prob the trainer tells."""
    ids = np.array([*prefix, *answer.before, *answer.ids], np.int32)
    is_answer = np.arange(len(ids)) >= len(ids) - len(answer.ids)
    tokens = Tokens(ids, is_answer, np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32))
    rollout = Rollout(len(ids), len(prefix), len(answer.ids), 0, "stop", branch=branch)
    return rollout, tokens


def _with_rewards(
    rollout: Rollout, tokens: Tokens, passages: Sequence[range], values: Sequence[float]
) -> tuple[Rollout, Tokens]:
    given = [TokenReward(passage.stop - 1, UTILITY, value) for passage, value in zip(passages, values, strict=True)]
    return replace(rollout, token_rewards=tuple(sorted((*rollout.token_rewards, *given)))), tokens
