"""A verifier's view of a rollout, and how it gets the text after the thought.

Invariant (tests/unit/verifiers): only the first delimiter counts, and special tokens after it are left out.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.types import Conversation, Prompt, Rollout, Tokenizer, Verdict


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verifier sees of a rollout."""

    prompt: Prompt
    rollout: Rollout
    response_ids: list[int]
    """All tokens after the prompt: thought, delimiter, answer and end of sequence."""
    conversation: Conversation | None = None
    """What was said in several turns."""

    @property
    def final_ids(self) -> list[int]:
        """The tokens of the last turn, or of the whole response if there are no turns."""
        return self.response_ids[self._start :]

    @property
    def earlier_ids(self) -> list[int]:
        """The tokens before `final_ids`. The beginning of an agent's first call is not known here."""
        prompt = self.prompt.token_ids
        if len(prompt) != self.rollout.num_prompt_tokens:  # an agent's conversation does not begin with the row's
            prompt = ()
        return [*prompt, *self.response_ids[: self._start]]

    @property
    def _start(self) -> int:
        """The index of the first token that is judged."""
        episode = self.rollout.episode
        return 0 if episode is None else episode.last_turn - self.rollout.num_prompt_tokens

    @property
    def continues(self) -> bool:
        """Whether the verdict on the next conversation of the same answer holds for it, too."""
        return self.rollout.episode is not None and self.rollout.episode.continues

    @property
    def is_judged(self) -> bool:
        """Whether rewards look at it."""
        return not self.fault and not self.continues

    @property
    def fault(self) -> str:
        """Why nothing can be said about the answer; empty if something can."""
        return self.rollout.episode.fault if self.rollout.episode else ""


BLOCK_TOKENS = 256
MAX_BLANKS = 8
"""The largest number of white-space tokens that a chat template appends to a thought that it has closed."""


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
    if require_stop and answer.rollout.finish != "stop":
        return Verdict(0.0, "cut by the length budget")
    if begins_closed(answer, delimiter, tokenizer):
        delimiter = ""
    text = text_after(delimiter, answer.final_ids, tokenizer)
    return Verdict(0.0, f"no {delimiter}") if text is None else text
