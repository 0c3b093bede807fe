"""The run's rewards as one: each scores all answers, then the scores are added up.

Invariants: one verdict a sample, in order; a sample abstains only if every reward did; the prompt is never
part of what is scored; an answer that a reward cannot score is an abstention or an error, as the configuration says.
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
    """The configured rewards.

    Args:
        configs: one or more.
        tokenizer: anything with `decode(ids, skip_special_tokens=...)`.
        delimiter: text that ends the thought (`</think>`); empty when the model has none.
    """

    def __init__(self, configs: Sequence[RewardConfig], tokenizer: Tokenizer, delimiter: str) -> None:
        self._configs = configs
        self._verifiers = [VERIFIERS[type(cfg)](cfg, tokenizer, delimiter) for cfg in configs]
        needs_truth = any(isinstance(cfg, ExactAnswerReward) for cfg in configs)
        self.required_columns = ("ground_truth",) if needs_truth else ()
        """Columns that every row must have."""

    def score(self, index: int, answers: Sequence[Answer]) -> list[Verdict]:
        """One verdict an answer, of one reward alone.

        Raises:
            ValueError: the reward could not score an answer, and its `on_error` is stop.
        """
        cfg = self._configs[index]
        verdicts = self._verifiers[index].score(answers)
        if cfg.on_error == "stop":
            for answer, verdict in zip(answers, verdicts, strict=True):
                if verdict.failed:
                    raise ValueError(f"reward {cfg.label}, {answer.prompt.uid}: {verdict.reason}")
        return verdicts


def answers_of(
    prompts: Sequence[Prompt], tokens: Sequence[Sequence[Tokens]], finishes: Sequence[Sequence[str]]
) -> list[Answer]:
    """Every sample of every group as the verifiers see it.

    Args:
        prompts: one a group.
        tokens: each group's samples, prompt included.
        finishes: `stop` or `length` of each sample.
    """
    return [
        Answer(prompt, sample.ids[len(prompt.token_ids) :].tolist(), finish)
        for prompt, group, ends in zip(prompts, tokens, finishes, strict=True)
        for sample, finish in zip(group, ends, strict=True)
    ]


def weighted_sum(weights: Sequence[float], verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on one answer from those of all rewards.

    A reward that abstains is left out of the sum: the others count with their own weights, as in TRL. When all abstain,
    so does the sum.
    """
    reason = "; ".join(verdict.reason for verdict in verdicts if verdict.reason)
    parts = tuple(verdict.score for verdict in verdicts)
    terms = [w * score for w, score in zip(weights, parts, strict=True) if score is not None]
    return Verdict(sum(terms) if terms else None, reason, parts)
