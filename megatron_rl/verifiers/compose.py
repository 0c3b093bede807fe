"""Combines the rewards of a run: each reward scores all answers, and then the scores are added.

Invariants: there is one verdict for each sample, in order; the sum is an abstention only if every reward abstained; the
prompt is never part of the scored text; the configuration decides whether an answer that a reward cannot score is an
abstention or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_rl.config.rewards import FunctionReward, GroundTruthReward, RewardConfig
from megatron_rl.types import Prompt, Tokens, Verdict
from megatron_rl.verifiers.answer import Answer, Tokenizer
from megatron_rl.verifiers.functions import FunctionVerifier
from megatron_rl.verifiers.ground_truth import VERIFY, GroundTruthVerifier


class AnswerVerifier(Protocol):
    def score(self, answers: Sequence[Answer]) -> list[Verdict]: ...


VERIFIERS: dict[type, Callable[..., AnswerVerifier]] = {
    **dict.fromkeys(VERIFY, GroundTruthVerifier),
    FunctionReward: FunctionVerifier,
}
"""One line for each verifier: (its configuration, tokenizer, delimiter) -> verifier. The key is the class of its
configuration."""


def required_columns(configs: Sequence[RewardConfig]) -> tuple[str, ...]:
    """The columns that every row must have for these rewards."""
    needs_truth = any(isinstance(cfg, GroundTruthReward) and cfg.datasets is None for cfg in configs)
    return ("ground_truth",) if needs_truth else ()


class RewardSet:
    """The configured rewards.

    Args:
        configs: the configurations of one or more rewards.
        tokenizer: any object with `decode(ids, skip_special_tokens=...)`.
        delimiter: the text that ends the thought (`</think>`); empty if the model does not think.
    """

    def __init__(self, configs: Sequence[RewardConfig], tokenizer: Tokenizer, delimiter: str) -> None:
        self._configs = configs
        self._verifiers = [VERIFIERS[type(cfg)](cfg, tokenizer, delimiter) for cfg in configs]
        self.required_columns = required_columns(configs)
        """The columns that every row must have."""

    def score(self, index: int, answers: Sequence[Answer]) -> list[Verdict]:
        """The verdicts of the reward with this index, one for each answer. It abstains on rows of data sets that it
        does not score.

        Raises:
            ValueError: the reward could not score an answer, and its `on_error` is `stop`.
        """
        cfg = self._configs[index]
        own = [answer for answer in answers if cfg.scores(answer.prompt.columns)]
        given = iter(self._verifiers[index].score(own) if own else [])
        other = Verdict(None, f"{cfg.label} does not score rows of this data set")
        verdicts = [next(given) if cfg.scores(answer.prompt.columns) else other for answer in answers]
        if cfg.on_error == "stop":
            for answer, verdict in zip(answers, verdicts, strict=True):
                if verdict.failed:
                    raise ValueError(f"reward {cfg.label}, {answer.prompt.uid}: {verdict.reason}")
        return verdicts


def answers_of(
    prompts: Sequence[Prompt], tokens: Sequence[Sequence[Tokens]], finishes: Sequence[Sequence[str]]
) -> list[Answer]:
    """All samples of all groups, in the form in which the verifiers receive them.

    Args:
        prompts: the prompt of each group.
        tokens: the samples of each group, including their prompt.
        finishes: `stop` or `length` for each sample of each group.
    """
    return [
        Answer(prompt, sample.ids[len(prompt.token_ids) :].tolist(), finish)
        for prompt, group, ends in zip(prompts, tokens, finishes, strict=True)
        for sample, finish in zip(group, ends, strict=True)
    ]


def weighted_sum(weights: Sequence[float], verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on one answer from the verdicts of all rewards.

    A reward that abstains is left out of the sum, and the others keep their weights, as in TRL. If all abstain, the
    result is an abstention.
    """
    reason = "; ".join(verdict.reason for verdict in verdicts if verdict.reason)
    parts = tuple(verdict.score for verdict in verdicts)
    terms = [w * score for w, score in zip(weights, parts, strict=True) if score is not None]
    return Verdict(sum(terms) if terms else None, reason, parts)
