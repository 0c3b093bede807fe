"""The budget of each answer's thought, which the driver chooses before it asks for the answer.

Invariants (tests/unit/loop): a budget is a function of the configuration, the seed, the number of the prompt in the
stream, the number of the answer, the step, and, with `quantile`, of the lengths that were recorded; it is within the
bounds of the configuration; restored lengths give the same budgets as the saved ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.config.thinking import QuantileBudget, ScheduledBudget, UniformBudget
from megatron_rl.loop.evaluation import right_answers
from megatron_rl.types import Group, Prompt, Rollout


class ThoughtBudgets:
    def __init__(self, config: GrpoRunConfig) -> None:
        self._config = config
        self._tokens = config.rollout.thinking.thought_tokens if config.rollout.thinking else None
        self._lengths: list[list[int]] = []
        """The lengths, for each of the last steps, of its whole thoughts that led to right answers, in tokens."""

    def give(self, prompt: Prompt, number: int, step: int) -> Prompt:
        """The prompt with the budgets of its answers. If all budgets equal `ThinkingBudget.of_row`, none are set.

        Args:
            number: the prompt's number in the stream of prompts.
            step: the step whose weights begin the answers.
        """
        num_samples, tokens = self._config.rollout.samples_per_prompt, self._tokens
        if isinstance(tokens, UniformBudget):
            random = np.random.default_rng([self._config.run.seed, number])
            drawn = random.integers(tokens.low, tokens.high + 1, num_samples).tolist()
            return replace(prompt, thought_budgets=tuple(drawn if tokens.per == "sample" else drawn[:1] * num_samples))
        if isinstance(tokens, ScheduledBudget):
            return replace(prompt, thought_budgets=(tokens.at(step),) * num_samples)
        if isinstance(tokens, QuantileBudget):
            return replace(prompt, thought_budgets=(self._quantile(tokens),) * num_samples)
        return prompt

    def _quantile(self, tokens: QuantileBudget) -> int:
        lengths = [length for step in self._lengths for length in step]
        if not lengths:
            return tokens.start
        return int(np.clip(np.quantile(lengths, tokens.quantile, method="inverted_cdf"), tokens.low, tokens.high))

    def record(self, groups: Sequence[Group]) -> None:
        """Note the verified groups that a step trains on."""
        if not isinstance(self._tokens, QuantileBudget):
            return
        lengths = [
            size
            for group in groups
            for sample in group.answers
            if self._is_right(sample)
            for size in _uncut_thoughts(sample)
        ]
        self._lengths = [*self._lengths, lengths][-self._tokens.num_steps :]

    def _is_right(self, sample: Rollout) -> bool:
        return right_answers(self._config, [sample.verdict]) == [True]

    def state(self) -> list[list[int]]:
        """The recorded lengths, in JSON's types."""
        return self._lengths

    def restore(self, state: list[list[int]]) -> None:
        self._lengths = state


def _uncut_thoughts(answer: Rollout) -> list[int]:
    """The lengths of the reasoning of an answer, or of its turns, that no budget has cut."""
    if answer.episode is not None:
        return [size for size in answer.episode.thoughts if size]
    return [answer.num_thought_tokens] if answer.num_thought_tokens and not answer.thought_cut else []
