"""The run's rewards as one: decode once, score with each, add up.

Invariants: one verdict a sample, in order; a sample abstains only if every reward did; the prompt is never
part of what is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_rl.config.schema import ExactAnswerReward, FunctionReward, RewardConfig
from megatron_rl.types import Prompt, Tokens, Verdict
from megatron_rl.verifiers.answer import Answer, Tokenizer
from megatron_rl.verifiers.exact_answer import ExactAnswer
from megatron_rl.verifiers.functions import FunctionVerifier


class AnswerVerifier(Protocol):
    def score(self, answers: Sequence[Answer]) -> list[Verdict]: ...


VERIFIERS: dict[type, Callable[..., AnswerVerifier]] = {
    ExactAnswerReward: ExactAnswer,
    FunctionReward: FunctionVerifier,
}
"""One line a verifier, keyed by its config class: (cfg, tokenizer, delimiter) -> verifier."""


class RewardSet:
    """The weighted sum of the configured rewards.

    A reward that abstains on a sample is left out of that sample's sum: the others count with their own
    weights, as in TRL. When all abstain, so does the sum.

    Args:
        configs: one or more.
        tokenizer: anything with `decode(ids, skip_special_tokens=...)`.
        delimiter: text that ends the thought (`</think>`); empty when the model has none.
    """

    def __init__(self, configs: Sequence[RewardConfig], tokenizer: Tokenizer, delimiter: str) -> None:
        self._verifiers = [VERIFIERS[type(cfg)](cfg, tokenizer, delimiter) for cfg in configs]
        self._weights = [cfg.weight for cfg in configs]
        needs_truth = any(isinstance(cfg, ExactAnswerReward) for cfg in configs)
        self.required_columns = ("ground_truth",) if needs_truth else ()
        """Columns that every row must have."""

    def score(
        self, prompts: Sequence[Prompt], tokens: Sequence[Sequence[Tokens]], finishes: Sequence[Sequence[str]]
    ) -> list[list[Verdict]]:
        """Score every sample of every group.

        Args:
            prompts: one a group.
            tokens: each group's samples, prompt included.
            finishes: `stop` or `length` of each sample.

        Returns:
            One verdict a sample, by group.
        """
        answers = [
            Answer(prompt, sample.ids[len(prompt.token_ids) :].tolist(), finish)
            for prompt, group, ends in zip(prompts, tokens, finishes, strict=True)
            for sample, finish in zip(group, ends, strict=True)
        ]
        columns = [verifier.score(answers) for verifier in self._verifiers]
        verdicts = iter([_weighted_sum(self._weights, parts) for parts in zip(*columns, strict=True)])
        return [[next(verdicts) for _ in group] for group in tokens]


def _weighted_sum(weights: Sequence[float], verdicts: Sequence[Verdict]) -> Verdict:
    reason = "; ".join(verdict.reason for verdict in verdicts if verdict.reason)
    parts = tuple(verdict.score for verdict in verdicts)
    terms = [w * score for w, score in zip(weights, parts, strict=True) if score is not None]
    return Verdict(sum(terms) if terms else None, reason, parts)
