"""The programs of an answer, with and without a budget for its thought.

Invariants (tests/unit/rollout): with a thinking budget at most `thought_tokens` of a thought are sampled, and at most
`response_tokens` of an answer; a sample contains the delimiter unless the model ended it within its thought, or its
thought was cut for good; if the thought ends with the beginning of the closing, only the rest is appended.
tests/unit/rollout/budget_cases.py has the rules as cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.rollout.program import Call, Disown, Done, Force, Transcript, find_delimiter


@dataclass(frozen=True, slots=True)
class OneCall:
    """The model answers at once, with at most this number of tokens."""

    max_tokens: int
    delimiter: tuple[int, ...] | None = None
    thought_tokens: None = None

    def next(self, transcript: Transcript) -> Call | Done:
        return Done(len(transcript.ids)) if transcript.num_calls else Call(self.max_tokens)


@dataclass(frozen=True, slots=True)
class TwoCallBudget:
    """A budget for the thought, and one for the answer, kept by two calls.

    The first call samples at most `thought_tokens`. If the delimiter is among them, the tokens after it belong to the
    answer. If it is not, the closing is forced. The second call samples the rest of the answer.
    """

    delimiter: tuple[int, ...]
    closing: tuple[int, ...] | None
    """It ends with the delimiter. None: nothing is forced, and the answer ends with the cut thought."""
    thought_tokens: int
    response_tokens: int

    def next(self, transcript: Transcript) -> Call | Force | Done:
        """
        Example with delimiter and closing (3,), thought_tokens 3 and response_tokens 4, after the first call:
            [7 7 7] cut          -> force (3,), then call for 4
            [7 3 8] cut          -> call for 3
            [7 3 8 1] ended by 1 -> done
        """
        ids = transcript.ids
        start = find_delimiter(ids, self.delimiter)
        if start is not None:
            left = self.response_tokens - (len(ids) - start - len(self.delimiter))
            return Done(len(ids) + min(left, 0)) if transcript.stopped or left <= 0 else Call(left)
        if transcript.num_calls == 0 and self.thought_tokens > 0:
            return Call(self.thought_tokens)
        if transcript.stopped or self.closing is None:
            return Done(len(ids))
        return Force(self.closing[_begun(ids, self.closing) :])


@dataclass(frozen=True, slots=True)
class ThoughtAlone:
    """The model thinks, and something else answers: the transcript ends with the delimiter, which is forced if the
    thought has none within its budget. It ends earlier if the model ends its answer within the thought."""

    delimiter: tuple[int, ...]
    closing: tuple[int, ...]
    """It ends with the delimiter."""
    thought_tokens: int

    def next(self, transcript: Transcript) -> Call | Force | Done:
        """A call ends where a delimiter may be complete, so that nothing is sampled after it."""
        ids = transcript.ids
        start = find_delimiter(ids, self.delimiter)
        if start is not None:
            return Done(start + len(self.delimiter))
        if transcript.stopped:
            return Done(len(ids))
        left = self.thought_tokens - len(ids)
        if left > 0:
            return Call(left, stops=self.delimiter[-1:])
        return Force(self.closing[_begun(ids, self.closing) :])


@dataclass(frozen=True, slots=True)
class NativeBudget:
    """The same budgets. The engine enforces the thought's budget: it forces the closing, in one call.

    vLLM restarts its count wherever the model opens a thought. So a call ends there, and another one goes on with
    what is left of the budget; a thought that an answer opens has none.
    """

    opening: int
    delimiter: tuple[int, ...]
    closing: tuple[int, ...]
    thought_tokens: int
    response_tokens: int
    num_before: int = 0
    """The number of the prompt's tokens after the opening."""

    def next(self, transcript: Transcript) -> Call | Disown | Done:
        """
        Raises:
            ValueError: the engine did not force the closing where it had to.
        """
        ids = transcript.ids
        forced = self._forced(ids)
        if any(transcript.is_action[i] for i in forced):
            return Disown(forced)
        start = find_delimiter(ids, self.delimiter)
        if start is not None:
            left = self.response_tokens - (len(ids) - start - len(self.delimiter))
            return Done(len(ids) + min(left, 0)) if transcript.stopped or left <= 0 else Call(left)
        if transcript.stopped:
            return Done(len(ids))
        opened = next((i for i in range(len(ids), 0, -1) if ids[i - 1] == self.opening), -self.num_before)
        left = self.thought_tokens - len(ids)
        budget = len(ids) - opened + left
        return Call(left + len(self.closing) + self.response_tokens, budget, stops=(self.opening,))

    def _forced(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The indices of the tokens that the engine has forced."""
        thought = ids[: self.thought_tokens]
        if len(ids) <= self.thought_tokens or find_delimiter(thought, self.delimiter) is not None:
            return ()
        rest = self.closing[_begun(thought, self.closing) :]
        found = tuple(ids[self.thought_tokens : self.thought_tokens + len(rest)])
        if found != rest:
            raise ValueError(
                f"rollout.thinking: the engine was given a budget of {self.thought_tokens} reasoning tokens, and then "
                f"had to force {rest}, but the answer goes on with {found}: vLLM did not keep its thinking budget. Set "
                "rollout.thinking.mode to two_call"
            )
        return tuple(range(self.thought_tokens, self.thought_tokens + len(rest)))


def _begun(ids: Sequence[int], closing: Sequence[int]) -> int:
    """The length of the longest beginning of the closing, but not the whole, that `ids` ends with; 0 if there is
    none."""
    sizes = range(min(len(closing) - 1, len(ids)), 0, -1)
    return next((size for size in sizes if list(ids[-size:]) == list(closing[:size])), 0)
