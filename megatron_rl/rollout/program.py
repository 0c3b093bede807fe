"""What happens between the calls of an engine while one answer is generated.

A program sees the transcript of an answer, which is what the engine has sampled so far, and says what comes next: a
call that samples more tokens, tokens that are appended, or the end. It keeps no state of its own, so one program serves
all answers.

Invariants (tests/unit/rollout): forced tokens are no actions, and all other ones are; each action keeps its own
version.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from megatron_rl.types import Picture, Rollout, Tokens

NEXT_CALL = 0x1E3779B97F4A7C15
"""What is added to the seed of an answer from call to call where a call does not go on from the tokens of the one
before it, so that it has other noise."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that one call sampled, including the end-of-sequence token.

    Example: weights of version 4 answer with the tokens 31 and 1, and 1 ends the answer:
    `Completion(ids=(31, 1), logp=(-0.3, -0.2), version=(4, 4), stopped=True)`.
    """

    ids: Sequence[int]
    logp: Sequence[float]
    """The log-prob of each token."""
    version: Sequence[int]
    """The version of the weights that sampled each token. A push may arrive in the middle of a call."""
    stopped: bool
    """True if the model ended its answer, False if the token limit or one of `Call.stops` ended the call."""
    routes: np.ndarray | None = None
    """[R, layers, K]: the experts of the first R tokens of prompt and response, `Tokens.routes`; None if the
    engine does not give them."""
    candidates: Mapping[int, float] = field(default_factory=dict)
    """The log-probs of `Call.num_candidates` tokens."""
    prompt_logp: Sequence[float] = ()
    """The log-probs of the prompt's last tokens, if the call has `num_scored`. They are the log-probs of the model
    itself, at any sampling temperature. Tokens that the engine found in its cache have none."""


@dataclass(slots=True)
class Transcript:
    """The response of one answer so far. The lists have one entry for each token."""

    ids: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    """The log-prob of each action; 0 for forced tokens."""
    version: list[int] = field(default_factory=list)
    """The version of the weights that sampled each action; -1 for forced tokens."""
    routes: np.ndarray | None = None
    """The routes of the prompt and of the tokens so far; see `Completion.routes`."""
    num_calls: int = 0
    stopped: bool = False
    """Whether the model ended its answer with the last call."""

    def sampled(self, completion: Completion) -> None:
        """Complete a call. Its routes include all previous tokens, too."""
        self.add(completion)
        self.num_calls += 1
        self.stopped = completion.stopped

    def append(self, other: Transcript) -> None:
        """Append what follows this transcript."""
        self.ids += other.ids
        self.is_action += other.is_action
        self.logp += other.logp
        self.version += other.version
        self.routes, self.stopped = other.routes, other.stopped
        self.num_calls += other.num_calls

    def add(self, part: Completion) -> None:
        """Append the first tokens of a call that goes on."""
        self.routes = part.routes
        self.ids += part.ids
        self.is_action += [True] * len(part.ids)
        self.logp += part.logp
        self.version += part.version

    def copy(self) -> Transcript:
        ids, is_action, logp, version = self.ids.copy(), self.is_action.copy(), self.logp.copy(), self.version.copy()
        return Transcript(ids, is_action, logp, version, self.routes, self.num_calls, self.stopped)

    def force(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.is_action += [False] * len(ids)
        self.logp += [0.0] * len(ids)
        self.version += [-1] * len(ids)

    def disown(self, indices: Collection[int]) -> None:
        """Note that the engine has forced these tokens, so that they are no actions."""
        for i in indices:
            self.is_action[i], self.logp[i], self.version[i] = False, 0.0, -1

    def cut(self, num_tokens: int) -> None:
        """Keep the first tokens. If tokens are cut off, the model did not end what remains."""
        if num_tokens < len(self.ids):
            for column in (self.ids, self.is_action, self.logp, self.version):
                del column[num_tokens:]
            self.stopped = False


@dataclass(frozen=True, slots=True)
class Call:
    """Sample up to this number of tokens."""

    max_tokens: int
    thinking_token_budget: int | None = None
    """vLLM's own thinking budget of this call: the largest number of tokens after the last opening of a thought,
    including tokens of the prompt; None: no budget."""
    stops: tuple[int, ...] = ()
    """Tokens that end the call, though not the answer, in addition to the tokens that end both."""
    num_candidates: int = 0
    """The number of most probable tokens that a call for one token returns, instead of the sampled one."""
    num_scored: int = 0
    """The number of the prompt's last tokens whose log-probs a call for one token returns. The token that is sampled
    has no use then."""
    reads_cache: bool = True
    """Whether the beginning of the prompt may come from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a sampler is asked for: one completion."""

    ids: Sequence[int]
    """The prompt, with what has been sampled after it."""
    call: Call
    seed: int
    is_greedy: bool = False
    """Whether the most probable tokens are taken; only with the ability `greedy`."""
    answer: tuple[int, int] | None = None
    """The ticket of the group and the number of the sample; None: the completion is no part of an answer."""
    goes_on: bool = False
    """Whether the answer has begun with an earlier request."""
    pictures: Sequence[Picture] = ()
    """The images whose tokens are among `ids`; only with the ability `images`."""


@dataclass(frozen=True, slots=True)
class Force:
    """Append these tokens, which are no actions."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Disown:
    """The engine has forced the tokens with these indices: they are no actions."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete with the first `num_tokens` tokens of the transcript."""

    num_tokens: int


class Program(Protocol):
    @property
    def thought_tokens(self) -> int | None:
        """The largest number of sampled tokens in the thought; None: it has no budget."""

    @property
    def delimiter(self) -> tuple[int, ...] | None:
        """The tokens that end the thought; None: the answer has none."""

    def next(self, transcript: Transcript) -> Call | Force | Disown | Done: ...


@dataclass(frozen=True, slots=True)
class Bounded:
    """Another program with at most `most` tokens in all."""

    program: Program
    most: int

    @property
    def thought_tokens(self) -> int | None:
        return self.program.thought_tokens

    @property
    def delimiter(self) -> tuple[int, ...] | None:
        return self.program.delimiter

    def next(self, transcript: Transcript) -> Call | Force | Disown | Done:
        step, left = self.program.next(transcript), self.most - len(transcript.ids)
        if isinstance(step, Call):
            return replace(step, max_tokens=min(step.max_tokens, left)) if left > 0 else Done(len(transcript.ids))
        if isinstance(step, Force) and len(step.ids) >= left:
            return Done(len(transcript.ids))
        return step


def next_call(program: Program, transcript: Transcript) -> Call | None:
    """Go on with a program until it wants a call, or until the answer is complete, which is None."""
    while True:
        step = program.next(transcript)
        if isinstance(step, Call):
            return step
        if isinstance(step, Done):
            transcript.cut(step.num_tokens)
            return None
        if isinstance(step, Force):
            transcript.force(step.ids)
        else:
            transcript.disown(step.indices)


def replay(program: Program, sampled: Completion, stop_ids: Collection[int]) -> tuple[Transcript, Call | None]:
    """Continue an answer when only its sampled tokens are known.

    Args:
        sampled: the tokens of all calls, one after the other; `stopped` has no meaning.
        stop_ids: the tokens that end an answer.

    Returns:
        The transcript, and what is left of the running call; None if the answer is complete.

    Example: if the first call is for 3 tokens and the second one for 4, five tokens are the first call and two tokens
    of the second, and two are left.
    """
    transcript, used = Transcript(), 0
    while (call := next_call(program, transcript)) is not None:
        ids = sampled.ids[used : used + call.max_tokens]
        stop = next((i for i, token in enumerate(ids) if token in stop_ids or token in call.stops), None)
        part = slice(used, used + (len(ids) if stop is None else stop + 1))
        stopped = stop is not None and ids[stop] not in call.stops
        completion = Completion(sampled.ids[part], sampled.logp[part], sampled.version[part], stopped)
        if stop is None and len(ids) < call.max_tokens:
            transcript.add(completion)
            return transcript, replace(call, max_tokens=call.max_tokens - len(ids))
        transcript.sampled(completion)
        used = part.stop
    return transcript, None


def find_delimiter(ids: Sequence[int], delimiter: Sequence[int]) -> int | None:
    """The index of the first token of the first complete delimiter; None if there is none."""
    size, wanted = len(delimiter), list(delimiter)
    starts = range(len(ids) - size + 1)
    return next((i for i in starts if ids[i] == wanted[0] and list(ids[i : i + size]) == wanted), None)


Samples = list[tuple[Rollout, Tokens]]
"""Answers with their tokens."""


def as_rollout(
    prompt_ids: Sequence[int],
    transcript: Transcript,
    delimiter: Sequence[int] | None,
    thought_budget: int | None = None,
    pictures: tuple[Picture, ...] = (),
) -> tuple[Rollout, Tokens]:
    """A complete answer and its tokens.

    Args:
        pictures: the prompt's images.
        delimiter: the tokens that end the thought; None if the model does not think.
        thought_budget: the budget of the thought; None: it had none. See `Rollout.num_thought_tokens`.
    """
    prompt, has_budget = len(prompt_ids), thought_budget is not None
    end = find_delimiter(transcript.ids, delimiter) if delimiter else None
    thought = transcript.is_action[:end] if end is not None or has_budget else []
    closed = None if end is None or delimiter is None else transcript.is_action[: end + len(delimiter)]
    sample = Rollout(
        length=prompt + len(transcript.ids),
        num_prompt_tokens=prompt,
        num_actions=sum(transcript.is_action),
        num_thought_tokens=sum(thought),
        finish="stop" if transcript.stopped else "length",
        thought_cut=has_budget and not (transcript.stopped if closed is None else all(closed)),
        thought_budget=thought_budget,
        oldest_version=min((v for v in transcript.version if v >= 0), default=-1),
        digest=zlib.crc32(np.array(transcript.ids, np.int32).tobytes()),
    )
    return sample, Tokens(
        ids=np.array([*prompt_ids, *transcript.ids], np.int32),
        action_mask=np.array([False] * prompt + transcript.is_action, bool),
        logp_rollout=np.array([0.0] * prompt + transcript.logp, np.float32),
        version=np.array([-1] * prompt + transcript.version, np.int32),
        routes=None if transcript.routes is None else transcript.routes[: prompt + len(transcript.ids)],
        pictures=pictures,
    )
