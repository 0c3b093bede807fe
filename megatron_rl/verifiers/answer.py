"""The form in which a verifier receives a sample, and how it gets the text after the thought.

Invariant (tests/unit/verifiers): only the first delimiter counts, and special tokens after it are left out.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.types import Episode, Prompt, TokenReward, Verdict


class Tokenizer(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: Prompt
    response_ids: list[int]
    """All tokens after the prompt: thought, delimiter, answer and end of sequence."""
    finish: str
    """`stop` if the model ended its answer, `length` if a budget cut it."""
    episode: Episode | None = None
    """The turns of the answer, if it has several; the last one is then what is judged."""
    token_rewards: tuple[TokenReward, ...] = ()
    """See `Sample.token_rewards`."""
    num_prompt_tokens: int = 0
    """The number of tokens before the response. Those of an agent's conversation are not the row's prompt."""

    @property
    def final_ids(self) -> list[int]:
        """The tokens of the last turn, or of the whole response if there are no turns."""
        if self.episode is None:
            return self.response_ids
        return self.response_ids[self.episode.last_turn - self.num_prompt_tokens :]

    @property
    def earlier_ids(self) -> list[int]:
        """The tokens before those. What an agent's first call begins with is not known here."""
        if self.episode is None:
            return list(self.prompt.token_ids)
        prompt = self.prompt.token_ids if len(self.prompt.token_ids) == self.num_prompt_tokens else ()
        return [*prompt, *self.response_ids[: self.episode.last_turn - self.num_prompt_tokens]]

    @property
    def fault(self) -> str:
        """Why nothing can be said about the answer; empty if something can."""
        return self.episode.fault if self.episode else ""


BLOCK_TOKENS = 256
MAX_BLANKS = 8
"""A chat template appends at most so many tokens of white space to a thought that it has closed."""


def text_after(delimiter: str, ids: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """The text after the first delimiter, without special tokens; None if there is no delimiter. An empty delimiter
    gives the whole text.

    The delimiter may be a special token, or several tokens, or end inside a token, so the search is in the text. It
    goes block by block, and each block is extended by as many tokens as the delimiter can have. In the block that
    contains the delimiter it goes on by bisection. This costs little more than decoding once.
    """
    if not delimiter:
        return tokenizer.decode(ids, skip_special_tokens=True)

    def holds_delimiter(part: Sequence[int]) -> bool:
        return delimiter in tokenizer.decode(part, skip_special_tokens=False)

    for start in range(0, len(ids), BLOCK_TOKENS):
        block = ids[start : start + BLOCK_TOKENS + len(delimiter.encode())]
        if not holds_delimiter(block):
            continue
        prefixes = [block[:n] for n in range(1, len(block) + 1)]
        first = prefixes[bisect.bisect_left(prefixes, True, key=holds_delimiter)]
        same_token = tokenizer.decode(first, skip_special_tokens=False).partition(delimiter)[2]
        return same_token + tokenizer.decode(ids[start + len(first) :], skip_special_tokens=True)
    return None


def begins_closed(answer: Answer, delimiter: str, tokenizer: Tokenizer) -> bool:
    """Whether the thought was closed before the answer began, as chat templates do that switch thinking off: what comes
    before ends with the delimiter and white space. Then the whole answer is judged."""
    tail = answer.earlier_ids[-len(delimiter.encode()) - MAX_BLANKS :]
    return bool(delimiter) and tokenizer.decode(tail, skip_special_tokens=False).rstrip().endswith(delimiter)


def judged_text(answer: Answer, require_stop: bool, delimiter: str, tokenizer: Tokenizer) -> str | Verdict:
    """The text after the thought; the verdict with the score 0 if there is none, or if a budget cut the answer and
    `require_stop` is set."""
    if require_stop and answer.finish != "stop":
        return Verdict(0.0, "cut by the length budget")
    if begins_closed(answer, delimiter, tokenizer):
        delimiter = ""
    text = text_after(delimiter, answer.final_ids, tokenizer)
    return Verdict(0.0, f"no {delimiter}") if text is None else text
