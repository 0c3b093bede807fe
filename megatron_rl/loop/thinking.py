"""The thinking budget: a plan between two calls of the engine, and the join of both into one sample.

Call 1 samples at most n tokens. If the closing delimiter is among them, what follows it is answer already; if
it is not, it is forced. Call 2 gives the answer what is left of its m tokens. Invariants (tests/unit/loop):
the thought has at most n tokens and the answer at most m; a sample that the model did not end itself in its
thought holds the delimiter; a delimiter of which the cut left a beginning is completed, not doubled; forced
tokens are no actions; each action keeps its own version; without a second call nothing is sampled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Sample, Tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """What one call sampled, the end-of-sequence token included."""

    ids: Sequence[int]
    logp: Sequence[float]
    """One a token."""
    version: Sequence[int]
    """One a token: the weights that sampled it. A push may arrive in the middle of a call."""
    stopped: bool
    """The model ended it; else its token limit did."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What becomes of call 1 and what call 2 is to do."""

    num_kept: int
    """Tokens of call 1 that stay; fewer than it gave when the answer ran over its budget."""
    forced: tuple[int, ...]
    """Appended to them: the delimiter, or what the cut left out of it."""
    max_tokens: int
    """Of call 2; 0: there is none."""


def find_delimiter(ids: Sequence[int], delimiter: Sequence[int]) -> int | None:
    """Index of the first token of the first whole delimiter."""
    size, wanted = len(delimiter), list(delimiter)
    starts = range(len(ids) - size + 1)
    return next((i for i in starts if ids[i] == wanted[0] and list(ids[i : i + size]) == wanted), None)


def plan_second_call(first: Completion, delimiter: Sequence[int], response_tokens: int) -> Continuation:
    """Plan from what call 1 sampled.

    Example, delimiter (3,), response_tokens 4:
        [7 7 7] cut          -> keep 3, force (3,), sample 4
        [7 3 8] cut          -> keep 3, force ()  , sample 3
        [7 3 8 1] ended by 1 -> keep 4, force ()  , sample 0
    """
    start = find_delimiter(first.ids, delimiter)
    if start is None:
        if first.stopped:
            return Continuation(len(first.ids), (), 0)
        begun = _begun(first.ids, delimiter)
        return Continuation(len(first.ids), tuple(delimiter[begun:]), response_tokens)
    answered = len(first.ids) - start - len(delimiter)
    excess = max(0, answered - response_tokens)
    left = 0 if first.stopped else max(0, response_tokens - answered)
    return Continuation(len(first.ids) - excess, (), left)


def _begun(ids: Sequence[int], delimiter: Sequence[int]) -> int:
    """Length of the longest beginning of the delimiter that `ids` ends with."""
    for size in range(min(len(delimiter) - 1, len(ids)), 0, -1):
        if list(ids[-size:]) == list(delimiter[:size]):
            return size
    return 0


def join(
    prompt_ids: Sequence[int],
    calls: Sequence[Completion],
    forced: Sequence[int],
    delimiter: Sequence[int] | None,
) -> tuple[Sample, Tokens]:
    """One sample from its calls: prompt, call 1 as it is kept, forced tokens, call 2.

    Args:
        calls: one or two; `truncate` call 1 to `num_kept` before.
        forced: stands between the calls.
        delimiter: ends the thought. `num_thought_tokens` counts the response's tokens before its first one
            and is 0 when the response has none (or the model knows no such token: None).

    Returns:
        The driver's record and the tokens; finish is `stop` if the model ended the last call.
    """
    prompt, first, second = len(prompt_ids), calls[0], calls[1] if len(calls) > 1 else None
    parts = [list(prompt_ids), list(first.ids), list(forced), list(second.ids) if second else []]
    ids = np.array([token for part in parts for token in part], np.int32)
    action_mask = np.zeros(len(ids), bool)
    logp = np.zeros(len(ids), np.float32)
    version = np.full(len(ids), -1, np.int32)
    start = prompt
    for call in calls:
        end = start + len(call.ids)
        action_mask[start:end] = True
        logp[start:end] = call.logp
        version[start:end] = call.version
        start = end + len(forced)
    thought = find_delimiter(ids[prompt:].tolist(), delimiter) if delimiter else None
    sample = Sample(
        length=len(ids),
        num_prompt_tokens=prompt,
        num_actions=sum(len(call.ids) for call in calls),
        num_thought_tokens=thought or 0,
        finish="stop" if calls[-1].stopped else "length",
        thought_cut=bool(forced),
    )
    return sample, Tokens(ids, action_mask, logp, version)


def truncate(first: Completion, num_kept: int) -> Completion:
    """The beginning of a call; what it loses was not the model's end of it."""
    if num_kept == len(first.ids):
        return first
    return Completion(first.ids[:num_kept], first.logp[:num_kept], first.version[:num_kept], stopped=False)
