"""The thinking budget: it plans the second of two calls of the engine, and joins both calls into one sample.

Call 1 samples at most n tokens. If the delimiter is among them, the tokens after it belong to the answer. If it is not,
the delimiter is appended as forced tokens. Call 2 samples the rest of the answer, up to m answer tokens in total.

Invariants (tests/unit/loop): the thought has at most n tokens and the answer at most m; a sample contains the delimiter
unless the model ended the sample within its thought; if the cut left the beginning of a delimiter, only its rest is
appended; forced tokens are no actions; each action keeps its own version; without a second call nothing is sampled
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Continuation:
    """The plan after call 1: which of its tokens are kept, and what call 2 samples."""

    num_kept: int
    """The number of tokens of call 1 that are kept. It is less than all if the answer exceeded its budget."""
    forced: tuple[int, ...]
    """The tokens that are appended to them: the delimiter, or the rest of it if the cut left its beginning."""
    max_tokens: int
    """The largest number of tokens of call 2; 0 means that there is no call 2."""


def find_delimiter(ids: Sequence[int], delimiter: Sequence[int]) -> int | None:
    """The index of the first token of the first complete delimiter; None if there is none."""
    size, wanted = len(delimiter), list(delimiter)
    starts = range(len(ids) - size + 1)
    return next((i for i in starts if ids[i] == wanted[0] and list(ids[i : i + size]) == wanted), None)


def plan_second_call(first: Completion, delimiter: Sequence[int], response_tokens: int) -> Continuation:
    """Plan call 2 from the tokens of call 1.

    Example with delimiter (3,) and response_tokens 4:
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
    """The length of the longest beginning of the delimiter that `ids` ends with; 0 if there is none."""
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
    """Make one sample of its calls: the prompt, the kept tokens of call 1, the forced tokens, and call 2.

    Args:
        calls: one or two calls. Call 1 must have been cut to `num_kept` by `truncate`.
        forced: the tokens between the calls.
        delimiter: the tokens that end the thought; None if the model does not think. `num_thought_tokens` is the number
            of response tokens before the first delimiter, or 0 if there is none.

    Returns:
        The driver's record of the sample, and its tokens. `finish` is `stop` if the model ended the last call.
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
    """The first `num_kept` tokens of a call. If tokens are cut off, the model did not end what remains."""
    if num_kept == len(first.ids):
        return first
    return Completion(first.ids[:num_kept], first.logp[:num_kept], first.version[:num_kept], stopped=False)
