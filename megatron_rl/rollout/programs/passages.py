"""Splits a thought into passages, at the words that begin a new idea ("Wait,", "Alternatively,"), and an
answer of several turns into its turns.

Invariants (tests/unit/rollout): the passages are the thought, in order, and none is empty; each boundary is between two
tokens; none is longer than `max_tokens`; only the last one, or what follows a cut at `max_tokens`, is shorter than
`min_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

SENTENCE_END = re.compile(r"[.!?。！？]['\")\]]*\s|\n")
"""Where a passage that is too long is cut."""


def split(texts: Sequence[str], markers: Sequence[str], min_tokens: int, max_tokens: int) -> list[range]:
    """The passages of a thought, as indices of its tokens.

    A passage begins with the first token of a marker, if the marker stands at the beginning of the thought or
    after white space, and the passage before it has `min_tokens`. A passage that would be longer than `max_tokens` ends
    with its last sentence that fits and leaves both parts `min_tokens`, or else after `max_tokens`.

    Args:
        texts: the text of each token (`token_texts`).

    Example: with the marker "Wait," and min_tokens 2, the tokens "So", " 2", ".", " Wait", ",", " 3" give (0, 1, 2) and
    (3, 4, 5).
    """
    if not texts:
        return []
    whole, ends = "".join(texts), list(accumulate(map(len, texts)))
    pattern = re.compile("|".join(rf"(?<!\S){re.escape(marker)}" for marker in markers)) if markers else None
    marked = [match.start() for match in pattern.finditer(whole)] if pattern else []
    sentences = [match.end() for match in SENTENCE_END.finditer(whole)]
    begins = _tokens_at(marked, ends)
    # A sentence ends with the token that has its last character.
    after_sentences = [token + 1 for token in _tokens_at([at - 1 for at in sentences], ends)]
    passages: list[range] = []
    start = 0
    for stop in [*begins, len(texts)]:
        if stop - start < min_tokens and stop < len(texts):
            continue
        while stop - start > max_tokens:
            latest = min(start + max_tokens, stop - min_tokens)
            fitting = [at for at in after_sentences if start + min_tokens <= at <= latest]
            cut = fitting[-1] if fitting else start + max_tokens
            passages.append(range(start, cut))
            start = cut
        if stop > start:
            passages.append(range(start, stop))
            start = stop
    return passages


def chapters(action_mask: np.ndarray) -> list[range]:
    """The turns of an answer but the last one, each with its observation, as indices of its tokens. So a turn is worth
    what it has found out, too. The last turn is the answer itself.

    Args:
        action_mask: bool [L]; a turn is a run of actions.

    Example: the mask 0 0 1 1 0 1 0 0 1 gives (2, 3, 4) and (5, 6, 7).
    """
    begins = np.flatnonzero(np.diff(action_mask.astype(np.int8), prepend=0) == 1).tolist()
    return [range(first, following) for first, following in pairwise(begins)]


def _tokens_at(characters: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The indices of the tokens with these characters, in ascending order, each once.

    Args:
        characters: positions in the whole text, ascending.
        ends: the position after the last character of each token.
    """
    found: list[int] = []
    token = 0
    for at in characters:
        while ends[token] <= at:
            token += 1
        if not found or found[-1] != token:
            found.append(token)
    return found


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to the text of the tokens before it. A token that ends within a character adds
    nothing; the one that completes it adds the character."""
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in ids]
