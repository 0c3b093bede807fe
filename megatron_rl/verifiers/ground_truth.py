"""The rewards that compare the text after the thought with the row's ground truth.

Invariants (tests/unit/verifiers): the thought is never scored; an answer without the delimiter, or one that a budget
cut, scores 0; a row whose ground truth cannot be used fails for all of its answers, so that it never keeps only some of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.config.rewards import (
    CodeReward,
    ExactAnswerReward,
    GroundTruthReward,
    InstructionsReward,
    JudgedReward,
    MathematicsReward,
    ReasoningGymReward,
    TextReward,
)
from megatron_rl.types import Tokenizer, Verdict
from megatron_rl.verifiers import exact_answer, reasoning_gym
from megatron_rl.verifiers import text as texts
from megatron_rl.verifiers.answer import Answer, judged_text
from megatron_rl.verifiers.pool import Pool
from megatron_rl.verifiers.truth import texts_of

TESTS_SHARE = 0.8
"""The part of `answer_timeout_s` that the tests of a program have. The rest is for the processes that start and end, so
that an answer whose program sleeps or computes without end is judged, and not given up."""


def _mathematics(cfg: MathematicsReward, text: str, truth: Any) -> Verdict:
    from megatron_rl.verifiers.mathematics import comparison  # sympy takes a second to import

    try:
        truths = texts_of(truth, "mathematics")
    except ValueError as error:
        return Verdict(None, str(error), failed=True)
    verdicts = [comparison.verify(text, one, cfg.mode) for one in truths]
    return max(verdicts, key=lambda verdict: (verdict.failed, verdict.score))


def _code(cfg: CodeReward, text: str, truth: Any) -> Verdict:
    from megatron_rl.verifiers.sandbox import code, process

    limits = process.Limits(cpu_s=cfg.cpu_s, memory_bytes=cfg.memory_mib * 2**20)
    return code.verify(text, truth, limits, cfg.score, within_s=TESTS_SHARE * cfg.answer_timeout_s)


def _instructions(cfg: InstructionsReward, text: str, truth: Any) -> Verdict:
    from megatron_rl.verifiers.instructions import checks

    return checks.verify(text, truth, cfg.score)


def _reasoning_gym(cfg: ReasoningGymReward, text: str, truth: Any) -> Verdict:
    return reasoning_gym.verify(text, truth)


VERIFY: dict[type[GroundTruthReward], Callable[..., Verdict]] = {
    ExactAnswerReward: exact_answer.verify,
    TextReward: texts.verify,
    MathematicsReward: _mathematics,
    CodeReward: _code,
    InstructionsReward: _instructions,
    ReasoningGymReward: _reasoning_gym,
}
"""One line for each kind of reward: (its configuration, text after the thought, ground truth) -> verdict."""


FORMAL = (MathematicsReward, ReasoningGymReward)
"""The kinds whose ground truth was read before the run. What makes a comparison slow is then the answer, which must not
escape the score 0 by it. The pattern of a `TextReward` is the row's."""

EXAMPLES: dict[type[GroundTruthReward], tuple[str, Any]] = {
    MathematicsReward: (r"\boxed{\frac{x}{2} + 1}", r"\frac{x + 2}{2}"),
    CodeReward: ("```python\nprint(1)\n```", [{"input": "", "output": "1"}]),
    InstructionsReward: ("a text", {"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}),
    ReasoningGymReward: ("0", {"task": "leg_counting", "answer": "0", "metadata": {}, "config": {}}),
}
"""A text and a ground truth. Judging them imports what the kind needs."""


class GroundTruthVerifier:
    """The verifier of every `GroundTruthReward`.

    Args:
        num_workers: the number of processes that judge the answers of a `JudgedReward`. They start with the first
            answers.
    """

    def __init__(self, cfg: GroundTruthReward, tokenizer: Tokenizer, delimiter: str, num_workers: int) -> None:
        self.judge, self._num_workers = Judge(cfg, tokenizer, delimiter), num_workers
        self._pool: Pool[Answer] | None = None

    def score(self, answers: Sequence[Answer]) -> list[Verdict]:
        cfg = self.judge.cfg
        if not isinstance(cfg, JudgedReward):
            return [self.judge(answer) for answer in answers]
        if self._pool is None:
            too_much = Verdict(0.0, f"it needs more than {cfg.answer_timeout_s:g} s of computing")
            self._pool = Pool(
                self.judge, self._num_workers, cfg.answer_timeout_s, too_much if isinstance(cfg, FORMAL) else None
            )
        verdicts = self._pool.judge(answers)
        return [
            replace(verdict, reason=f"{answer.prompt.uid}: {verdict.reason}")
            if verdict.failed and answer.prompt.uid not in verdict.reason
            else verdict
            for answer, verdict in zip(answers, verdicts, strict=True)
        ]

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()


class Judge:
    """Judges one answer. It can be pickled; where it is unpickled, it first fills the caches that a first verdict
    fills, so that forked workers have them."""

    def __init__(self, cfg: GroundTruthReward, tokenizer: Tokenizer, delimiter: str) -> None:
        self.cfg, self.tokenizer, self.delimiter = cfg, tokenizer, delimiter

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if type(self.cfg) in EXAMPLES:
            VERIFY[type(self.cfg)](self.cfg, *EXAMPLES[type(self.cfg)])

    def __call__(self, answer: Answer) -> Verdict:
        text = judged_text(answer, self.cfg.require_stop, self.delimiter, self.tokenizer)
        truth = self.cfg.ground_truth(answer.prompt.columns)
        verdict = VERIFY[type(self.cfg)](self.cfg, text if isinstance(text, str) else "", truth)
        if verdict.failed:
            return replace(verdict, reason=f"{answer.prompt.uid}: {verdict.reason}")
        if not isinstance(text, str):
            return text
        details = {f"{self.cfg.label}/{name}": value for name, value in verdict.details.items()}
        return replace(verdict, details=details) if details else verdict


def fault_of_ground_truth(cfg: GroundTruthReward, truth: Any) -> str | None:
    """Why no answer could be compared with this ground truth; None if there is no reason that is quickly found."""
    if isinstance(cfg, MathematicsReward):  # to read it takes too long
        try:
            texts_of(truth, "mathematics")
        except ValueError as error:
            return str(error)
        return None
    if isinstance(cfg, ReasoningGymReward):
        return reasoning_gym.fault_of(truth)  # to import the library takes too long
    verdict = VERIFY[type(cfg)](cfg, "", truth)
    return verdict.reason if verdict.failed else None
