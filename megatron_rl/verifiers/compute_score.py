"""Any Python function with verl's signature as a reward.

The contract is the same as for verl's `custom_reward_function` (https://verl.readthedocs.io, "Implement Reward Function
for Dataset") and its naive reward manager. As there, a thought is part of `solution_str`.

Invariants (tests/unit/verifiers): an exception, or a result of the wrong form, gives its own answer a failed verdict
with the reason, and so does a row without a ground truth; none of these is ever the score 0. Other entries of a mapping
are reported for each answer, and its numbers are metrics, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_rl.config.exception_text import printable, traced
from megatron_rl.config.rewards import ComputeScoreReward
from megatron_rl.types import Tokenizer, Verdict
from megatron_rl.verifiers.answer import Answer
from megatron_rl.verifiers.function_calls import ImportedFunction, Logged, TrainerState, as_json, as_number
from megatron_rl.verifiers.truth import is_missing

log = logging.getLogger(__name__)

NO_TRUTH = Verdict(None, "the row has neither `ground_truth` nor `reward_model` with a `ground_truth`", failed=True)


class ComputeScoreVerifier:
    """Calls f(data_source=, solution_str=, ground_truth=, extra_info=) once for each answer, one after the other, or
    all at the same time if the function is asynchronous. A function that takes only some of these gets only those."""

    def __init__(self, cfg: ComputeScoreReward, tokenizer: Tokenizer, delimiter: str) -> None:
        self._cfg, self._tokenizer = cfg, tokenizer
        self._function = ImportedFunction(cfg)
        self.is_async = self._function.is_async
        self._has_raised = False

    def score(self, answers: Sequence[Answer], state: TrainerState, logged: Logged) -> list[Verdict]:
        def one(answer: Answer) -> Verdict:
            if is_missing(self._cfg.ground_truth(answer.prompt.columns)):
                return NO_TRUTH
            try:
                return self._verdict(self._function.call(self._offered(answer)), logged)
            except BaseException as error:  # a user's function may raise anything, and this is never a score
                return self._failed(error)

        return list(map(one, answers))

    async def score_async(self, answers: Sequence[Answer], state: TrainerState, logged: Logged) -> list[Verdict]:
        """The same for an asynchronous function."""

        async def one(answer: Answer) -> Verdict:
            if is_missing(self._cfg.ground_truth(answer.prompt.columns)):
                return NO_TRUTH
            call = await self._function.ended(partial(self._offered, answer))
            try:
                return self._verdict(call.result(), logged)
            except BaseException as error:  # as above
                return self._failed(error)

        return list(await asyncio.gather(*map(one, answers)))

    def _offered(self, answer: Answer) -> dict[str, Any]:
        columns = answer.prompt.columns
        return {
            "data_source": self._cfg.data_source(columns),
            "solution_str": self._tokenizer.decode(answer.response_ids, skip_special_tokens=True),
            "ground_truth": deepcopy(self._cfg.ground_truth(columns)),  # functions may write into them
            "extra_info": deepcopy(dict(columns.get("extra_info") or {})),
        }

    def _failed(self, error: BaseException) -> Verdict:
        if not self._has_raised:  # one traceback is enough: all failures are counted and have their reasons
            log.error("%s raised\n%s", self._function.path, traced(error))
        self._has_raised = True
        return self._function.fault_of(error)

    def _verdict(self, result: Any, logged: Logged) -> Verdict:
        if not isinstance(result, Mapping):
            return self._function.verdict_of(result)
        if "score" not in result:
            has = printable(", ".join(map(str, result)))
            reason = f"{self._function.path} returned a mapping without `score` (it has {has})"
            return Verdict(None, reason, failed=True)
        details = {}
        for name, value in result.items():
            if name != "score":
                if as_number(value) is not None:
                    logged.log_metric(name, value)
                details[f"{self._cfg.label}/{name}"] = as_json(value)
        return replace(self._function.verdict_of(result["score"]), details=details)
