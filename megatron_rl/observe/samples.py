"""What samples.jsonl has of an answer: its text, its verdict, and a table of its response's tokens.

Invariant: the lengths of a table's pieces add up to the length of the decoded text, thought and answer together. An
answer whose tokens cannot be found in its text has no table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from megatron_rl.config.reward import datasets_of
from megatron_rl.types import Group, Rollout, Share, Tokenizer, Tokens, text_of_turn

MOST_TOKENS = 16
"""The largest number of tokens in one piece of text."""
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character, or not yet a complete one."""


class Pieces:
    """Divides a text into the pieces of its tokens. The texts of single tokens are kept for the next answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    def text(self, ids: Sequence[int]) -> str:
        """The decoded text, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def lengths(self, ids: Sequence[int], text: str) -> list[int] | None:
        """The number of characters of each token, in order. Tokens that are parts of one character are one piece: its
        length is the last token's, and the others have 0. None if the tokens do not make up the text.

        Args:
            text: the decoded text of `ids`.
        """
        found: list[int] = []
        begin = place = 0  # of the piece, in the tokens and in the text
        for end in range(1, len(ids) + 1):
            piece = self._piece(ids[begin:end])
            # A tokenizer may remove the space before the first word of what it decodes.
            own = next((one for one in (piece, f" {piece}") if text.startswith(one, place)), None)
            is_complete = not piece.endswith(NO_CHARACTER) or end - begin == MOST_TOKENS
            if own is not None and is_complete:
                found += [0] * (end - begin - 1) + [len(own)]
                begin, place = end, place + len(own)
            elif end - begin == MOST_TOKENS:
                return None
        if begin < len(ids):  # the answer ends inside a character
            return [*found, *[0] * (len(ids) - begin - 1), len(text) - place]
        return found if place == len(text) else None

    def _piece(self, ids: Sequence[int]) -> str:
        if len(ids) > 1:
            return self.text(ids)
        if ids[0] not in self._alone:
            self._alone[ids[0]] = self.text(ids)
        return self._alone[ids[0]]


def answer_record(group: Group, index: int, tokens: Tokens, pieces: Pieces, delimiter: str) -> dict[str, Any]:
    """The record of one answer. Numbers of tokens are counts; `reward` is the score before shaping.

    Args:
        index: the answer's number within the group.
        delimiter: the text that ends the thought; empty if the model does not think.
    """
    sample, prompt = group.rollouts[index], group.prompt
    verdict = sample.verdict
    ids: list[int] = tokens.ids[sample.num_prompt_tokens :].tolist()
    text = pieces.text(ids)
    thought, answer = _split(text, delimiter)
    question = prompt.messages
    if not isinstance(question, str):
        question = "\n".join(f"{turn['role']}: {text_of_turn(turn)}" for turn in question)
        question += "" if tokens.conversation is None else tokens.conversation.opening
    record = {
        "uid": prompt.uid,
        "index": index,
        "prompt": question,
        "thought": thought,
        "answer": answer,
        "ground_truth": prompt.columns.get("ground_truth"),
        "reward": verdict.score,
        "reason": verdict.reason,
        "details": dict(verdict.details),
        "finish": sample.finish,
        "num_tokens": len(ids),
        "num_prompt_tokens": sample.num_prompt_tokens,
        "num_thought_tokens": sample.num_thought_tokens,
    }
    known = {
        "datasets": datasets_of(prompt.columns),
        "images": [[0, picture.digest] for picture in prompt.pictures] + _read_images(tokens, len(prompt.pictures)),
        "parts": list(verdict.parts),
        "tokens": token_table(tokens, sample, pieces.lengths(ids, text)),
    }
    shaped = {} if verdict.shaped is None else {"shaped": verdict.shaped}
    return record | shaped | {key: value for key, value in known.items() if value}


def _read_images(tokens: Tokens, num_asked: int) -> list[list[int | str]]:
    """The images that an environment has shown, with the number of the model's turn before each, counted from 1."""
    read, number = [], 0
    for turn in tokens.conversation.turns if tokens.conversation else ():
        number += turn["role"] == "assistant"
        parts = [] if isinstance(turn["content"], str) else turn["content"]
        read += [number for part in parts if "text" not in part]
    # The first of several conversations has the images of its own turns alone.
    return [[place, picture.digest] for place, picture in zip(read, tokens.pictures[num_asked:], strict=False)]


def token_table(tokens: Tokens, sample: Rollout, lengths: list[int] | None) -> dict[str, Any] | None:
    """The table of the response's tokens; None if there are no lengths.

    `lengths` are the characters of each token (`Pieces.lengths`). `actions` has the lengths of runs of tokens, by turns
    sampled and not sampled, beginning with sampled ones. `versions` has runs as pairs of a version of the weights and a
    length. `rewards` has the position in the response, the kind and the value of each reward at a token. `columns` has
    a number for each token by the name of the column; `logp_rollout` is the engine's log-prob in hundredths of a nat,
    0 at tokens that are no actions, and null where it is not finite.
    """
    if lengths is None:
        return None
    begin = sample.num_prompt_tokens
    actions = _runs(tokens.action_mask[begin:].tolist())
    # float64, because 100 times a log-prob must not become infinite
    hundredths = 100 * tokens.logp_rollout[begin:].astype(np.float64)
    table: dict[str, Any] = {
        "lengths": lengths,
        "actions": [length for _, length in ([(True, 0)] if actions and not actions[0][0] else []) + actions],
        "versions": _runs(tokens.version[begin:].tolist()),
        "columns": {"logp_rollout": [round(one) if np.isfinite(one) else None for one in hundredths.tolist()]},
    }
    if sample.token_rewards:
        table["rewards"] = [[one.position - begin, one.kind, one.value] for one in sample.token_rewards]
    return table


def advantage_of(place: int, shares: Sequence[Share]) -> dict[str, float]:
    """The advantage that all actions of an answer have, as the entry of its record; empty if no rank trains on it, or
    if each token gets its own from the trainers.

    Args:
        place: the answer's index in the step.
    """
    found = [share.advantages[share.index == place] for share in shares if share.token_rewards is None]
    return next(({"advantage": float(f"{own[0]:.6g}")} for own in found if len(own)), {})


def _split(text: str, delimiter: str) -> tuple[str, str]:
    """The thought with its delimiter, and the answer."""
    if not delimiter or delimiter not in text:
        return "", text
    thought, delimiter, answer = text.partition(delimiter)
    return thought + delimiter, answer


def _runs(values: Iterable[int]) -> list[tuple[int, int]]:
    """Each value with the number of times that it follows itself."""
    return [(value, len(list(run))) for value, run in groupby(values)]
