"""Any Python function with TRL's signature as a reward.

Invariants: `None` is an abstention. An exception, or a result of the wrong form, gives every answer of the call a
failed verdict with the reason. A number that is not finite gives only its own answer a failed verdict. None of these is
ever the score 0.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from megatron_rl.config.function import load_function
from megatron_rl.config.rewards import FunctionReward
from megatron_rl.types import Prompt, Verdict
from megatron_rl.verifiers.answer import Answer, Tokenizer

log = logging.getLogger(__name__)


class FunctionVerifier:
    """Calls f(prompts=, completions=, completion_ids=, **columns) once for all given answers.

    As in TRL, a prompt and its completion are lists of chat turns if the row has `messages`, and plain text if it has
    `prompt`. Completions are decoded without special tokens. Each column of the rows is a list, with None for a row
    that lacks the column.
    """

    def __init__(self, cfg: FunctionReward, tokenizer: Tokenizer, delimiter: str) -> None:
        self.path, self.tokenizer, self.function = cfg.path, tokenizer, load_function(cfg.path)

    def score(self, answers: Sequence[Answer]) -> list[Verdict]:
        prompts = [_conversation(answer.prompt) for answer in answers]
        completions = [self._completion(answer) for answer in answers]
        completion_ids = [answer.response_ids for answer in answers]
        try:
            scores = self.function(
                prompts=prompts, completions=completions, completion_ids=completion_ids, **_columns(answers)
            )
        except Exception as error:  # a user's function may raise anything, and this is never a score
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{self.path} raised {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            log.exception("%s raised", self.path)
            return [Verdict(None, reason, failed=True)] * len(answers)
        return self._verdicts(scores, len(answers))

    def _completion(self, answer: Answer) -> str | list[dict[str, str]]:
        text = self.tokenizer.decode(answer.response_ids, skip_special_tokens=True)
        return text if isinstance(answer.prompt.messages, str) else [{"role": "assistant", "content": text}]

    def _verdicts(self, scores: Any, num_answers: int) -> list[Verdict]:
        if not isinstance(scores, Sequence) or isinstance(scores, str):
            reason = f"{self.path} returned {type(scores).__name__}, but it must return a list of numbers or None"
            return [Verdict(None, reason, failed=True)] * num_answers
        if len(scores) != num_answers:
            reason = f"{self.path} returned {len(scores)} scores for {num_answers} completions"
            return [Verdict(None, reason, failed=True)] * num_answers
        return [self._verdict(score, index) for index, score in enumerate(scores)]

    def _verdict(self, score: Any, index: int) -> Verdict:
        if score is None:
            return Verdict(None, f"{self.path} abstained")
        if isinstance(score, Real) and math.isfinite(score):
            return Verdict(float(score))
        reason = (
            f"{self.path} returned {score!r} ({type(score).__name__}) for completion {index}, but it must return a "
            "finite Python number, or None to abstain"
        )
        return Verdict(None, reason, failed=True)


def _conversation(prompt: Prompt) -> str | list[Mapping[str, str]]:
    return prompt.messages if isinstance(prompt.messages, str) else [dict(turn) for turn in prompt.messages]


def _columns(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for answer in answers for name in answer.prompt.columns)
    return {name: [answer.prompt.columns.get(name) for answer in answers] for name in names}
