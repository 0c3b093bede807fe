"""Combines the rewards of a run: each reward scores the answers of a call, and then the scores are added.

Invariants: there is one verdict for each sample, in order; the sum is an abstention only if every reward abstained; the
prompt is never part of the scored text; the configuration decides whether an answer that a reward cannot score is an
abstention or an error; asynchronous functions and servers are asked at the same time, and an error or a time-out of one
does not touch the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, mean
from typing import Any, Protocol

from megatron_rl.config.exception_text import place, said
from megatron_rl.config.rewards import (
    ComputeScoreReward,
    EnvironmentReward,
    FormatReward,
    FunctionReward,
    GroundTruthReward,
    JudgeReward,
    LengthReward,
    RewardConfig,
    RewardModelReward,
    ServiceReward,
)
from megatron_rl.types import Metrics, Prompt, Rollout, Tokenizer, Tokens, Verdict
from megatron_rl.verifiers.answer import Answer
from megatron_rl.verifiers.compute_score import ComputeScoreVerifier
from megatron_rl.verifiers.environment import EnvironmentVerifier
from megatron_rl.verifiers.form import FormatVerifier, LengthVerifier
from megatron_rl.verifiers.function_calls import Logged, TrainerState
from megatron_rl.verifiers.functions import FunctionVerifier
from megatron_rl.verifiers.ground_truth import GroundTruthVerifier

log = logging.getLogger(__name__)


class AnswerVerifier(Protocol):
    def score(self, answers: Sequence[Answer]) -> list[Verdict]: ...


class AsyncVerifier(Protocol):
    async def score_async(self, answers: Sequence[Answer], state: TrainerState, logged: Logged) -> list[Verdict]: ...


Verifier = AnswerVerifier | AsyncVerifier | FunctionVerifier | ComputeScoreVerifier


def _judge(cfg: JudgeReward, tokenizer: Tokenizer, delimiter: str) -> AsyncVerifier:
    from megatron_rl.verifiers.judge import JudgeVerifier  # httpx takes long to import

    return JudgeVerifier(cfg, tokenizer, delimiter)


def _reward_model(cfg: RewardModelReward, tokenizer: Tokenizer, delimiter: str) -> AsyncVerifier:
    from megatron_rl.verifiers.reward_model import RewardModelVerifier  # as above

    return RewardModelVerifier(cfg, tokenizer, delimiter)


VERIFIERS: dict[type, Callable[..., Verifier]] = {
    FormatReward: FormatVerifier,
    LengthReward: LengthVerifier,
    EnvironmentReward: EnvironmentVerifier,
    FunctionReward: FunctionVerifier,
    ComputeScoreReward: ComputeScoreVerifier,
    JudgeReward: _judge,
    RewardModelReward: _reward_model,
}
"""One line for each verifier except `GroundTruthVerifier`: (its configuration, tokenizer, delimiter) -> verifier. The
key is the class of its configuration."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What one reward gave for some answers, in one call or in several."""

    verdicts: list[Verdict]
    """One for each answer, in order."""
    seconds: float
    """The time of the calls, added up."""
    logged: Mapping[str, Sequence[float]]
    """The values that the reward has logged, by the name of their metric, `reward/<label>/<name>`."""

    @property
    def metrics(self) -> Metrics:
        """The means of what the reward has logged. They do not depend on the order of the values, to the bit. The mean
        of inf and -inf is NaN."""
        return {name: _mean(values) for name, values in self.logged.items()}


def _mean(values: Sequence[float]) -> float:
    try:
        return fmean(values)
    except (ValueError, OverflowError):  # inf and -inf, whose mean is NaN, or a sum that no float holds
        return mean(values)


class RewardSet:
    """The configured rewards.

    Args:
        configs: the configurations of one or more rewards.
        tokenizer: any object with `decode(ids, skip_special_tokens=...)`.
        delimiter: the text that ends the thought (`</think>`); empty if the model does not think.
        num_workers: the number of processes for each `JudgedReward`.
        own: the indices of the rewards that this process has; None: all.
        made: verifiers that are made already, by the indices of their rewards.
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        tokenizer: Tokenizer,
        delimiter: str,
        num_workers: int = 1,
        own: Collection[int] | None = None,
        made: Mapping[int, Verifier] = {},
    ) -> None:
        def make(cfg: RewardConfig) -> Verifier:
            if isinstance(cfg, GroundTruthReward):
                return GroundTruthVerifier(cfg, tokenizer, delimiter, num_workers)
            return VERIFIERS[type(cfg)](cfg, tokenizer, delimiter)

        own = range(len(configs)) if own is None else own
        self._configs = configs
        self._verifiers = {i: made[i] if i in made else make(configs[i]) for i in own}
        together = [i for i, verifier in self._verifiers.items() if getattr(verifier, "is_async", False)]
        alone = [[i] for i in self._verifiers if i not in together]
        self.calls: list[list[int]] = alone + ([together] if together else [])
        """The indices of the rewards of each call of `score`: the asynchronous ones in one call, which comes last, and
        each other one in its own."""
        self._runner = asyncio.Runner()
        """The only event loop, because clients of services stay bound to the loop that first used them."""

    def score(self, indices: Sequence[int], answers: Sequence[Answer], state: TrainerState) -> list[Scored]:
        """What the rewards with these indices, one entry of `calls`, give for the answers. A reward abstains on rows of
        data sets that it does not score, and fails on answers whose environment failed. Asynchronous ones run at the
        same time, each for its `timeout_s` at most.

        Raises:
            ValueError: a reward could not score an answer, and its `on_error` is `stop`.
        """
        if getattr(self._verifiers[indices[0]], "is_async", False):

            async def at_the_same_time() -> list[Scored]:
                return list(await asyncio.gather(*(self._score_async(index, answers, state) for index in indices)))

            try:
                scored = self._run(at_the_same_time())
            except asyncio.CancelledError:  # nobody else knows this task
                names = ", ".join(self._configs[index].label for index in indices)
                failed = Verdict(None, f"{names}: one of these functions cancelled the tasks of all", failed=True)
                scored = [Scored([failed] * len(self._own(index, answers)), 0.0, {}) for index in indices]
        else:
            scored = [self._score_alone(index, answers, state) for index in indices]
        return [
            replace(one, verdicts=self._for_all(index, answers, one.verdicts))
            for index, one in zip(indices, scored, strict=True)
        ]

    def _run(self, call: Coroutine[Any, Any, list[Scored]]) -> list[Scored]:
        """The result of a call in the event loop.

        What is raised in a task of a function is the result of that task, and whoever waits for it gets it. asyncio
        also ends the loop if it is SystemExit or KeyboardInterrupt; then the loop goes on here. `Runner.run` would
        cancel all functions at a SIGINT that one of them has raised.
        """
        loop = self._runner.get_loop()
        task = loop.create_task(call)
        while True:
            try:
                return loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                if task.done() or isinstance(error, SystemExit) and not _is_of_a_task(error):
                    raise
                log.warning("an asynchronous reward raised %s%s in a task", said(error), place(error))

    def _score_alone(self, index: int, answers: Sequence[Answer], state: TrainerState) -> Scored:
        """The verdicts on those answers that the reward scores."""
        verifier, own, start = self._verifiers[index], self._own(index, answers), time.perf_counter()
        logged = Logged(self._configs[index].label, len(own))
        if not own:
            verdicts = []
        elif isinstance(verifier, FunctionVerifier | ComputeScoreVerifier):
            verdicts = verifier.score(own, state, logged)
        else:
            assert hasattr(verifier, "score"), "`calls` has put it here"
            verdicts = verifier.score(own)
        return Scored(verdicts, time.perf_counter() - start, logged.values())

    async def _score_async(self, index: int, answers: Sequence[Answer], state: TrainerState) -> Scored:
        """The same for an asynchronous function, or for a server."""
        verifier, own, start = self._verifiers[index], self._own(index, answers), time.perf_counter()
        assert hasattr(verifier, "score_async"), "`calls` has put it here"
        logged, limit_s = Logged(self._configs[index].label, len(own)), self._configs[index].timeout_s
        verdicts: list[Verdict] = []
        if own and isinstance(self._configs[index], ServiceReward):
            verdicts = await verifier.score_async(own, state, logged)  # it keeps its time limit itself
        elif own:
            try:
                verdicts = await asyncio.wait_for(verifier.score_async(own, state, logged), limit_s)
            except TimeoutError:  # the verifier turns timeouts of the function into verdicts
                reason = f"{self._configs[index].label} was not done in its timeout_s, {limit_s:g} s"
                verdicts = [Verdict(None, reason, failed=True)] * len(own)
        return Scored(verdicts, time.perf_counter() - start, logged.values())

    def _own(self, index: int, answers: Sequence[Answer]) -> list[Answer]:
        cfg = self._configs[index]
        return [answer for answer in answers if cfg.scores(answer.prompt.columns) and answer.is_judged]

    def _for_all(self, index: int, answers: Sequence[Answer], own: Sequence[Verdict]) -> list[Verdict]:
        """One verdict for each answer, from the verdicts on the answers that the reward scores."""
        cfg, given = self._configs[index], iter(own)
        other = Verdict(None, f"{cfg.label} does not score rows of this data set")

        def judged(answer: Answer) -> Verdict:
            if not cfg.scores(answer.prompt.columns) or answer.continues:
                return other
            return Verdict(None, answer.fault, failed=True) if answer.fault else next(given)

        verdicts = [judged(answer) for answer in answers]
        for i in range(len(answers) - 2, -1, -1):
            if answers[i].continues:
                verdicts[i] = verdicts[i + 1]
        if cfg.on_error == "stop":
            for answer, verdict in zip(answers, verdicts, strict=True):
                if verdict.failed:
                    raise ValueError(f"reward {cfg.label}, {answer.prompt.uid}: {verdict.reason}")
        return verdicts


def _is_of_a_task(error: BaseException) -> bool:
    """Whether a task or a callback has raised what ended the loop. Ray's handler of SIGTERM raises SystemExit in the
    loop itself, too."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is asyncio.Handle._run.__code__ for frame, _ in frames)


def answers_of(
    prompts: Sequence[Prompt], tokens: Sequence[Sequence[Tokens]], rollouts: Sequence[Sequence[Rollout]]
) -> list[Answer]:
    """All rollouts of all groups, in the verifiers' form.

    Args:
        prompts: the prompt of each group.
        tokens: the tokens of the rollouts of each group, including their prompt.
        rollouts: the rollouts of each group.
    """
    return [
        Answer(prompt, rollout, own.ids[rollout.num_prompt_tokens :].tolist(), own.conversation)
        for prompt, of_group, group in zip(prompts, tokens, rollouts, strict=True)
        for own, rollout in zip(of_group, group, strict=True)
    ]


def weighted_sum(weights: Sequence[float], verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on one answer from the verdicts of all rewards.

    A reward that abstains is left out of the sum, and the others keep their weights, as in TRL. If all abstain, the
    result is an abstention.
    """
    reason = "; ".join(verdict.reason for verdict in verdicts if verdict.reason)
    parts = tuple(verdict.score for verdict in verdicts)
    details = {name: value for verdict in verdicts for name, value in verdict.details.items()}
    repeated = {size: share for verdict in verdicts for size, share in verdict.repeated.items()}
    terms = [w * score for w, score in zip(weights, parts, strict=True) if score is not None]
    return Verdict(sum(terms) if terms else None, reason, parts, repeated=repeated, details=details)
