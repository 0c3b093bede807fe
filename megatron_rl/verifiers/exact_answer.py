"""The exact_answer reward: 1 if the text after the thought equals the row's `ground_truth`, else 0.

Invariants: the thought is never scored; only the first delimiter counts; special tokens after the delimiter are
ignored; an answer without the delimiter scores 0.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from decimal import Decimal

from megatron_rl.config.rollout import ExactAnswerReward
from megatron_rl.types import Verdict
from megatron_rl.verifiers.answer import Answer, Tokenizer

# A minus sign belongs to a number if no digit is before it (the last number of 7-3 is 3), and a comma if it separates
# thousands.
NUMBER = re.compile(r"(?<![0-9])(-\$?|\$-)?([0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(\.[0-9]+)?")

BLOCK_TOKENS = 256


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


def last_number(text: str) -> Decimal | None:
    """The last number of a text; None if there is none. It may have the forms 72, 72.0, 1,234, $1,234.50 and -3. The
    last number of a fraction is its denominator."""
    match = None
    for match in NUMBER.finditer(text.replace("−", "-")):
        pass
    if match is None:
        return None
    sign, whole, decimals = match.groups()
    number = Decimal(whole.replace(",", "") + (decimals or ""))
    return -number if sign else number


class ExactAnswer:
    """The verifier of `ExactAnswerReward`. It fails only if a row has no ground truth that can be compared.

    With `answer="last_number"` the last number of the answer is compared with the last number of the ground truth.
    """

    def __init__(self, cfg: ExactAnswerReward, tokenizer: Tokenizer, delimiter: str) -> None:
        self.cfg, self.tokenizer, self.delimiter = cfg, tokenizer, delimiter

    def score(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> Verdict:
        try:
            truth = self._truth(answer)
        except ValueError as error:
            return Verdict(None, str(error), failed=True)
        if self.cfg.require_stop and answer.finish != "stop":
            return Verdict(0.0, "cut by the length budget")
        text = text_after(self.delimiter, answer.response_ids, self.tokenizer)
        if text is None:
            return Verdict(0.0, f"no {self.delimiter}")
        found = text.strip() if self.cfg.answer == "all" else last_number(text)
        if found == truth:
            return Verdict(1.0)
        return Verdict(0.0, "no number" if found is None else "other answer")

    def _truth(self, answer: Answer) -> str | Decimal:
        uid, truth = answer.prompt.uid, answer.prompt.columns.get("ground_truth")
        if not isinstance(truth, str | int | float):
            raise ValueError(
                f"{uid}: the exact_answer reward needs a `ground_truth` that is text or a number, but it is {truth!r}"
            )
        if self.cfg.answer == "all":
            return str(truth).strip()
        number = last_number(str(truth))
        if number is None:
            raise ValueError(f"{uid}: ground_truth {truth!r} holds no number; set the reward's answer to `all`")
        return number
