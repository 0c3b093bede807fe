"""Any Python function with TRL's signature as a reward.

The contract is the same as in `GRPOTrainer` (https://huggingface.co/docs/trl/grpo_trainer, "Using a custom reward
function"). `environments` are what is left of the objects: their attributes.

Invariants (tests/unit/verifiers): `None` is an abstention. An exception, or a result of the wrong form, gives every
answer of the call a failed verdict with the reason. A number that is not finite gives only its own answer a failed
verdict. None of these is ever the score 0.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from megatron_rl.config.exception_text import traced
from megatron_rl.config.rewards import FunctionReward
from megatron_rl.types import Tokenizer, Verdict
from megatron_rl.verifiers.answer import Answer
from megatron_rl.verifiers.function_calls import ImportedFunction, Logged, TrainerState, as_plain

log = logging.getLogger(__name__)


class FunctionVerifier:
    """Calls f(prompts=, completions=, completion_ids=, trainer_state=, log_metric=, log_extra=, **columns) once for all
    given answers. A function without **columns gets those arguments that it names.

    As in TRL, a prompt and its completion are lists of chat turns if the row has `messages`, and plain text if it has
    `prompt`. The completion of a run with an environment has all turns, as `types.Conversation`. Completions are
    decoded without special tokens. Each column of the rows is a list, with None for a row
    that lacks the column.
    """

    def __init__(self, cfg: FunctionReward, tokenizer: Tokenizer, delimiter: str) -> None:
        self._cfg, self._tokenizer = cfg, tokenizer
        self._function = ImportedFunction(cfg)
        self.is_async = self._function.is_async

    def score(self, answers: Sequence[Answer], state: TrainerState, logged: Logged) -> list[Verdict]:
        offered = self._offered(answers, state, logged)
        if isinstance(offered, Verdict):
            return [offered] * len(answers)
        try:
            return logged.onto(self._verdicts(self._function.call(offered), len(answers)))
        except BaseException as error:  # a user's function may raise anything, and this is never a score
            return self._failed(error, len(answers))

    async def score_async(self, answers: Sequence[Answer], state: TrainerState, logged: Logged) -> list[Verdict]:
        """The same for an asynchronous function."""
        offered = self._offered(answers, state, logged)
        if isinstance(offered, Verdict):
            return [offered] * len(answers)
        call = await self._function.ended(lambda: offered)
        try:
            return logged.onto(self._verdicts(call.result(), len(answers)))
        except BaseException as error:  # as above
            return self._failed(error, len(answers))

    def _offered(self, answers: Sequence[Answer], state: TrainerState, logged: Logged) -> dict[str, Any] | Verdict:
        """The arguments of a call, or a failed verdict if the rows' columns cannot be arguments."""
        columns = _columns(answers)
        given = {
            "prompts": [_prompt(answer) for answer in answers],
            "completions": [self._completion(answer) for answer in answers],
            "completion_ids": [list(answer.response_ids) for answer in answers],
            "environments": [_environment(answer) for answer in answers],
            "trainer_state": state,
            "log_metric": logged.log_metric,
            "log_extra": logged.log_extra,
        }
        if twice := sorted(given.keys() & columns):
            reason = f"rows have a column {twice[0]!r}, which is an argument of every reward function; rename it"
            return Verdict(None, reason, failed=True)
        return columns | given

    def _completion(self, answer: Answer) -> str | list[Mapping[str, Any]]:
        if answer.conversation is not None:
            return deepcopy(list(answer.conversation.turns))
        text = self._tokenizer.decode(answer.response_ids, skip_special_tokens=True)
        return text if isinstance(answer.prompt.messages, str) else [{"role": "assistant", "content": text}]

    def _failed(self, error: BaseException, num_answers: int) -> list[Verdict]:
        log.error("%s raised\n%s", self._function.path, traced(error))
        return [self._function.fault_of(error)] * num_answers

    def _verdicts(self, result: Any, num_answers: int) -> list[Verdict]:
        path, scores = self._function.path, as_plain(result)
        if not isinstance(scores, Sequence) or isinstance(result, str | bytes | bytearray | memoryview):
            found = result if isinstance(result, memoryview) else scores
            reason = f"{path} returned {type(found).__name__}, but it must return a list of numbers or None"
            return [Verdict(None, reason, failed=True)] * num_answers
        scores = list(scores)  # a class of the user's own may have another length than its items
        if len(scores) != num_answers:
            reason = f"{path} returned {len(scores)} scores for {num_answers} completions"
            return [Verdict(None, reason, failed=True)] * num_answers
        return [self._function.verdict_of(score, f" for completion {index}") for index, score in enumerate(scores)]


def _prompt(answer: Answer) -> str | list[dict[str, str]]:
    """A copy, like `_columns`, with what the environment has appended."""
    if isinstance(answer.prompt.messages, str):
        return answer.prompt.messages
    turns = [deepcopy(dict(turn)) for turn in answer.prompt.messages]
    if answer.conversation is not None and answer.conversation.opening:
        opening, content = answer.conversation.opening, turns[-1]["content"]
        turns[-1]["content"] += opening if isinstance(content, str) else [{"type": "text", "text": opening}]
    return turns


class ClosedEnvironment:
    """What a function gets of an answer's object: its attributes when the answer was complete."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(deepcopy(dict(state)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this environment has no {name!r}, only {', '.join(vars(self)) or 'nothing'}: reward functions get the "
            "attributes that JSON can hold, and no methods; keep what they need in an attribute"
        )


def _environment(answer: Answer) -> ClosedEnvironment | None:
    state = None if answer.conversation is None else answer.conversation.state
    return None if state is None else ClosedEnvironment(state)


def _columns(answers: Sequence[Answer]) -> dict[str, list[Any]]:
    """Copies: functions that run at the same time do not see what another one writes into them."""
    names = dict.fromkeys(name for answer in answers for name in answer.prompt.columns)
    return deepcopy({name: [answer.prompt.columns.get(name) for answer in answers] for name in names})
