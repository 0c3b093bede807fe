"""A teacher behind an OpenAI-compatible server that gives `prompt_logprobs`, as vLLM's does.

Invariants (tests/unit/verifiers): a reply without a finite log-prob of each token that was asked for is no reply; the
first token that the server writes otherwise than the policy's tokenizer is named before a run begins.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_rl.config.rewards import ServiceReward
from megatron_rl.config.teachers import TeacherConfig
from megatron_rl.types import Tokenizer
from megatron_rl.verifiers.function_calls import Logged
from megatron_rl.verifiers.service import Service, ServiceError

ATTEMPTS = 3


class TeacherServer:
    """
    Args:
        name: the teacher's key, for messages.
    """

    def __init__(self, teacher: TeacherConfig, name: str) -> None:
        assert teacher.server is not None, "the teacher has a server"
        self._name, self._model = name, teacher.model
        settings = {"url": teacher.server, "model": teacher.model or "", "attempts": ATTEMPTS}
        self._service = Service(ServiceReward(kind=name, answer_timeout_s=teacher.timeout_s, **settings))

    async def score(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[list[float]]:
        """See `Engine.score`.

        Raises:
            ValueError: the server gave no usable reply.
        """

        def read(ids: Sequence[int], number: int, reply: Any) -> list[float]:
            first = len(ids) - number
            found = [one["logprob"] for one in self._entries(ids, reply)[first:]]
            if not all(isinstance(logp, float) and math.isfinite(logp) for logp in found):
                raise ValueError("a log-prob is no finite number")
            return found

        return list(await asyncio.gather(*(self._ask(ids, partial(read, ids, number)) for ids, number in texts)))

    async def check(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        """Compare the server's texts of some tokens, one after the other, with those of the policy's tokenizer.

        Raises:
            ValueError: one differs, or the server gave no usable reply.
        """
        entries = await self._ask(ids, partial(self._entries, ids))
        for token, entry in list(zip(ids, entries, strict=True))[1:]:  # nothing predicts the first one
            ours, theirs = tokenizer.decode([token], skip_special_tokens=False), entry.get("decoded_token")
            if theirs is not None and "\N{REPLACEMENT CHARACTER}" not in ours + theirs and ours != theirs:
                raise ValueError(
                    f"{self._name}: token {token} is {ours!r} for the policy, and {theirs!r} for the teacher's server; "
                    "choose a teacher with the policy's tokens"
                )

    async def _ask(self, ids: Sequence[int], read: Any) -> Any:
        body: dict[str, Any] = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        if self._model is not None:
            body["model"] = self._model
        try:
            return await self._service.ask("/completions", json.dumps(body).encode(), read, Logged(self._name, 1))
        except ServiceError as error:
            raise ValueError(str(error)) from None

    def _entries(self, ids: Sequence[int], reply: Any) -> list[Any]:
        """What the server says of each token; an empty mapping of the first one."""
        try:
            given = reply["choices"][0]["prompt_logprobs"]
            entries = [{}] + [one[str(token)] for token, one in zip(ids[1:], given[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"it lacks the prompt_logprobs of the {len(ids)} tokens that were asked for") from None
        return entries
