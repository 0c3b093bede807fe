"""What the rewards that a server computes have in common: requests, repetitions, limits and a cache.

Invariants (tests/unit/verifiers): an answer without a usable reply has failed, which is never the score 0, and touches
no other answer; verdicts that are there when the time limit ends are kept; equal requests are made once; there are
never more requests at the same time than configured; the key is in no reason and in no log.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import re
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from megatron_rl.config.rewards import ServiceReward
from megatron_rl.types import Tokenizer, Verdict
from megatron_rl.verifiers.answer import Answer, judged_text
from megatron_rl.verifiers.function_calls import Logged, TrainerState

BACKOFF_S = 0.5
"""The time before the second request for an answer. It doubles with each further one, up to LONGEST_BACKOFF_S, and a
random half of it is left out, so that answers that failed together do not come again together."""
LONGEST_BACKOFF_S = 30.0
NUM_CACHED = 100_000
"""The number of replies that are kept. The one that was not used for the longest time goes first."""
MAX_MESSAGE_CHARACTERS = 300

for name in ("httpx", "httpcore"):  # they would write a line for each request, or its headers with the key
    logging.getLogger(name).setLevel(logging.WARNING)

Form = TypeVar("Form", bound=BaseModel)
Score = TypeVar("Score")


class ServiceError(Exception):
    """There is no score for an answer; the message says why."""


class Service:
    """Makes the requests to one server.

    Raises:
        ValueError: the variable with the server's key is not set.
    """

    def __init__(self, cfg: ServiceReward) -> None:
        self._cfg, self._key = cfg, cfg.api_key(os.environ)
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        limits = httpx.Limits(max_connections=cfg.max_concurrency, max_keepalive_connections=cfg.max_concurrency)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
        self._slots = asyncio.Semaphore(cfg.max_concurrency)
        self._next_s = 0.0
        """The time before which no request may begin, by `time.monotonic`."""
        self._random = random.Random()
        self.last_fault = ""
        """Why the last request without a score had none."""

    async def ask(self, path: str, body: bytes, read: Callable[[Any], Score], logged: Logged) -> Score:
        """The score in the server's reply. The metrics get `request_s`, the seconds of each request, and `retries`, the
        number of requests after the first one.

        Args:
            path: is appended to the server's address.
            body: a JSON text.
            read: the score of a reply, which it gets as parsed JSON. It raises ValueError if the reply makes no sense.

        Raises:
            ServiceError: no request gave a score.
        """
        for retry in range(self._cfg.attempts):
            if retry:
                longest = min(BACKOFF_S * 2 ** (retry - 1), LONGEST_BACKOFF_S)
                await asyncio.sleep(longest * self._random.uniform(0.5, 1))
            try:
                reply = await self._post(path, body, logged)
                if reply.is_success:
                    score = read(reply.json())
                    logged.log_metric("retries", retry)
                    return score
                fault = f"status {reply.status_code}: {self._shown(reply.text)}"
                if reply.status_code not in (408, 429) and reply.status_code < 500:
                    break
                self._next_s = max(self._next_s, time.monotonic() + _pause_s(reply.headers.get("retry-after", "")))
            except TimeoutError:
                fault = f"no reply within answer_timeout_s, {self._cfg.answer_timeout_s:g} s"
            except httpx.RequestError as error:
                fault = f"{type(error).__name__}: {self._shown(str(error))}"
            except (ValueError, RecursionError) as error:  # from the JSON, or from `read`
                fault = f"a reply that makes no sense: {self._shown(str(error))}"
            self.last_fault = fault
        logged.log_metric("retries", retry)
        raise ServiceError(f"{self._cfg.label}: {self._cfg.url}{path}, request {retry + 1} about an answer: {fault}")

    async def _post(self, path: str, body: bytes, logged: Logged) -> httpx.Response:
        async with self._slots:
            await self._wait_for_turn()
            start = time.perf_counter()
            async with asyncio.timeout(self._cfg.answer_timeout_s):
                reply = await self._client.post(self._cfg.url + path, content=body)
        logged.log_metric("request_s", time.perf_counter() - start)
        return reply

    def _shown(self, message: str) -> str:
        """A message in one line, cut, and without the key, which a server may repeat."""
        hidden = message.replace(self._key, "***") if self._key else message
        return " ".join(hidden.split())[:MAX_MESSAGE_CHARACTERS]

    async def _wait_for_turn(self) -> None:
        """Wait until the rate limit, and a pause that the server has asked for, allow a request."""
        begin = max(time.monotonic(), self._next_s)
        if self._cfg.requests_per_minute:
            self._next_s = begin + 60 / self._cfg.requests_per_minute
        await asyncio.sleep(begin - time.monotonic())


def parsed(form: type[Form], reply: Any) -> Form:
    """A reply in a form.

    Raises:
        ValueError: it lacks a part of the form.
    """
    try:
        return form.model_validate(reply, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _pause_s(retry_after: str) -> float:
    """The seconds of a header `Retry-After`, which is a number or a date; 0 without a header that can be read."""
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return (date - datetime.now(UTC)).total_seconds() if date.tzinfo else 0.0


_MARKS = re.compile(
    r"<[|｜][^<>]{1,64}[|｜]>|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_turn>|<<?/?SYS>>?|<seed:\w+>"
    r"|<(?:extra_id_|SPECIAL_|unused|reserved_?)\d+>|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|SYSTEM_PROMPT)\]"
    r"|\[(?:gMASK|CLS|SEP|MASK)\]|<sop>|\]~!?b\[?|\]~b\]"
)
"""The control tokens of the chat templates of ChatML, Llama, DeepSeek, GLM, Kimi, Gemma, Mistral, Nemotron, MiniMax,
Seed, T5 and BERT. The server has a tokenizer that is not known here."""


def without_marks(text: str) -> str:
    """An answer without text that is a control token of a server's model and could end its turn. A space follows the
    first character of each."""
    return _MARKS.sub(lambda match: f"{match[0][:1]} {match[0][1:]}", text)


class ServiceVerifier(ABC):
    """A reward that asks a server about each answer, about all of them at the same time."""

    is_async = True
    path: ClassVar[str]
    """The path of the requests, after the configured address."""
    unfinished_score: float = 0.0
    """The score of an answer that the server is not asked about, because it has no text after the thought, or because a
    budget cut it."""

    def __init__(self, cfg: ServiceReward, tokenizer: Tokenizer, delimiter: str) -> None:
        self._service, self._limits = Service(cfg), cfg
        self._tokenizer, self._delimiter = tokenizer, delimiter
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        """Scores by the digest of their requests."""

    @abstractmethod
    def request(self, answer: Answer, text: str) -> Mapping[str, Any]:
        """The request about an answer with this text after the thought.

        Raises:
            ValueError: the row cannot be asked about.
        """

    @abstractmethod
    def read(self, answer: Answer, reply: Any) -> float:
        """The score in a reply.

        Raises:
            ValueError: the reply makes no sense.
        """

    async def score_async(self, answers: Sequence[Answer], state: TrainerState, logged: Logged) -> list[Verdict]:
        """One verdict for each answer, in order, at the end of `timeout_s` at the latest. The metrics also get
        `cached`, the share of the answers that needed no request."""
        verdicts: dict[int, Verdict] = {}
        asked: dict[bytes, list[int]] = {}
        bodies: dict[bytes, bytes] = {}
        for i, answer in enumerate(answers):
            text = judged_text(answer, self._limits.require_stop, self._delimiter, self._tokenizer)
            try:
                body = json.dumps(self.request(answer, without_marks(text) if isinstance(text, str) else "")).encode()
            except ValueError as error:
                verdicts[i] = Verdict(None, str(error), failed=True)
                continue
            if not isinstance(text, str):
                verdicts[i] = replace(text, score=self.unfinished_score)
                continue
            digest = hashlib.sha256(body).digest()
            logged.log_metric("cached", digest in self._cache or digest in asked)
            if digest in self._cache:
                self._cache.move_to_end(digest)
                verdicts[i] = Verdict(self._cache[digest])
            else:
                asked.setdefault(digest, []).append(i)
                bodies[digest] = body
        given = await self._ask({key: (answers[asked[key][0]], body) for key, body in bodies.items()}, logged)
        for digest, indices in asked.items():
            verdicts |= dict.fromkeys(indices, given[digest])
        return [verdicts[i] for i in range(len(answers))]

    async def _ask(self, asked: Mapping[bytes, tuple[Answer, bytes]], logged: Logged) -> dict[bytes, Verdict]:
        """The verdicts on answers, by the digests of their requests."""
        verdicts: dict[bytes, Verdict] = {}
        limit_s, self._service.last_fault = self._limits.timeout_s, ""

        async def one(digest: bytes, answer: Answer, body: bytes) -> None:
            try:
                score = await self._service.ask(self.path, body, lambda reply: self.read(answer, reply), logged)
            except ServiceError as error:
                verdicts[digest] = Verdict(None, str(error), failed=True)
                return
            verdicts[digest] = Verdict(score)
            self._cache[digest] = score
            if len(self._cache) > NUM_CACHED:
                self._cache.popitem(last=False)

        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
                for digest, (answer, body) in asked.items():
                    group.create_task(one(digest, answer, body))
        reason = f"{self._limits.label} was not done in its timeout_s, {limit_s:g} s"
        if self._service.last_fault:
            reason += f"; the last request without a score: {self._service.last_fault}"
        return dict.fromkeys(asked, Verdict(None, reason, failed=True)) | verdicts
