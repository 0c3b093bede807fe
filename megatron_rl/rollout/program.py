"""What happens between the calls of an engine while one answer is generated.

A program sees the transcript of an answer, which is what the engine has sampled so far, and says what comes next: a
call that samples more tokens, tokens that are appended, or the end. It keeps no state of its own, so one program serves
all answers.

Invariants (tests/unit/rollout): with a thinking budget the thought has at most `thought_tokens` and the answer at most
`response_tokens`; a sample contains the delimiter unless the model ended it within its thought; if the cut left the
beginning of a delimiter, only its rest is appended; forced tokens are no actions; each action keeps its own version.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_rl.types import Sample, Tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that one call sampled, including the end-of-sequence token."""

    ids: Sequence[int]
    logp: Sequence[float]
    """The log-prob of each token."""
    version: Sequence[int]
    """The version of the weights that sampled each token. A push may arrive in the middle of a call."""
    stopped: bool
    """True if the model ended the call, False if the token limit did."""
    routes: np.ndarray | None = None
    """uint8 [R, layers, K]: the experts of the first R tokens of prompt and response, `Tokens.routes`; None if the
    engine does not give them."""


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
    """Whether the model ended the last call."""

    def sampled(self, completion: Completion) -> None:
        """Append the tokens of a call. Its routes are those of all tokens before, too."""
        self.routes = completion.routes
        self.ids += completion.ids
        self.is_action += [True] * len(completion.ids)
        self.logp += completion.logp
        self.version += completion.version
        self.num_calls += 1
        self.stopped = completion.stopped

    def force(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.is_action += [False] * len(ids)
        self.logp += [0.0] * len(ids)
        self.version += [-1] * len(ids)

    def cut(self, num_tokens: int) -> None:
        """Keep the first tokens. If tokens are cut off, the model did not end what remains."""
        if num_tokens < len(self.ids):
            for column in (self.ids, self.is_action, self.logp, self.version):
                del column[num_tokens:]
            self.stopped = False


@dataclass(frozen=True, slots=True)
class Call:
    """Sample up to so many tokens."""

    max_tokens: int


@dataclass(frozen=True, slots=True)
class Force:
    """Append these tokens, which are no actions."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete with the first `num_tokens` tokens of the transcript."""

    num_tokens: int


class Program(Protocol):
    def next(self, transcript: Transcript) -> Call | Force | Done: ...


class OneCall:
    """The model answers at once, with at most so many tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def next(self, transcript: Transcript) -> Call | Force | Done:
        return Done(len(transcript.ids)) if transcript.num_calls else Call(self._max_tokens)


class ThinkingBudget:
    """A budget for the thought, and one for the answer.

    The first call samples at most `thought_tokens`. If the delimiter is among them, the tokens after it belong to the
    answer. If it is not, the delimiter is forced. The second call samples the rest of the answer.
    """

    def __init__(self, delimiter: Sequence[int], thought_tokens: int, response_tokens: int) -> None:
        self._delimiter, self._thought_tokens, self._response_tokens = delimiter, thought_tokens, response_tokens

    def next(self, transcript: Transcript) -> Call | Force | Done:
        """
        Example with delimiter (3,), thought_tokens 3 and response_tokens 4, after the first call:
            [7 7 7] cut          -> force (3,), then call for 4
            [7 3 8] cut          -> call for 3
            [7 3 8 1] ended by 1 -> done
        """
        if transcript.num_calls == 0:
            return Call(self._thought_tokens)
        ids = transcript.ids
        start = find_delimiter(ids, self._delimiter)
        if start is None:
            return Done(len(ids)) if transcript.stopped else Force(tuple(self._delimiter[self._begun(ids) :]))
        left = self._response_tokens - (len(ids) - start - len(self._delimiter))
        if transcript.num_calls == 2 or transcript.stopped or left <= 0:
            return Done(len(ids) + min(left, 0))
        return Call(left)

    def _begun(self, ids: Sequence[int]) -> int:
        """The length of the longest beginning of the delimiter that `ids` ends with; 0 if there is none."""
        for size in range(min(len(self._delimiter) - 1, len(ids)), 0, -1):
            if list(ids[-size:]) == list(self._delimiter[:size]):
                return size
        return 0


def next_call(program: Program, transcript: Transcript) -> Call | None:
    """Go on with a program until it wants a call, or until the answer is complete, which is None."""
    while isinstance(step := program.next(transcript), Force):
        transcript.force(step.ids)
    if isinstance(step, Call):
        return step
    transcript.cut(step.num_tokens)
    return None


def replay(program: Program, sampled: Completion, stop_ids: Collection[int]) -> tuple[Transcript, Call | None, int]:
    """Go on with an answer of which only the sampled tokens are known.

    Args:
        sampled: the tokens of all calls, one after the other; `stopped` has no meaning.
        stop_ids: the tokens that end a call.

    Returns:
        The transcript of the calls that are complete, the call under way (None if the answer is complete), and the
        number of sampled tokens that belong to the complete calls.

    Example: if the first call is for 3 tokens and the second one for 4, five tokens are the first call and two tokens
    of the second.
    """
    transcript, used = Transcript(), 0
    while (call := next_call(program, transcript)) is not None:
        ids = sampled.ids[used : used + call.max_tokens]
        stop = next((i for i, token in enumerate(ids) if token in stop_ids), None)
        if stop is None and len(ids) < call.max_tokens:
            return transcript, call, used
        part = slice(used, used + (len(ids) if stop is None else stop + 1))
        transcript.sampled(Completion(sampled.ids[part], sampled.logp[part], sampled.version[part], stop is not None))
        used = part.stop
    return transcript, None, used


def find_delimiter(ids: Sequence[int], delimiter: Sequence[int]) -> int | None:
    """The index of the first token of the first complete delimiter; None if there is none."""
    size, wanted = len(delimiter), list(delimiter)
    starts = range(len(ids) - size + 1)
    return next((i for i in starts if ids[i] == wanted[0] and list(ids[i : i + size]) == wanted), None)


def as_sample(
    prompt_ids: Sequence[int], transcript: Transcript, delimiter: Sequence[int] | None
) -> tuple[Sample, Tokens]:
    """The driver's record of a complete answer, and its tokens.

    Args:
        delimiter: the tokens that end the thought; None if the model does not think. `num_thought_tokens` is the number
            of response tokens before the first delimiter, or 0 if there is none.
    """
    prompt = len(prompt_ids)
    thought = find_delimiter(transcript.ids, delimiter) if delimiter else None
    sample = Sample(
        length=prompt + len(transcript.ids),
        num_prompt_tokens=prompt,
        num_actions=sum(transcript.is_action),
        num_thought_tokens=thought or 0,
        finish="stop" if transcript.stopped else "length",
        thought_cut=not all(transcript.is_action),
        oldest_version=min((v for v in transcript.version if v >= 0), default=-1),
    )
    return sample, Tokens(
        ids=np.array([*prompt_ids, *transcript.ids], np.int32),
        action_mask=np.array([False] * prompt + transcript.is_action, bool),
        logp_rollout=np.array([0.0] * prompt + transcript.logp, np.float32),
        version=np.array([-1] * prompt + transcript.version, np.int32),
        routes=None if transcript.routes is None else transcript.routes[: prompt + len(transcript.ids)],
    )
