"""The rewards of an answer's form: `format` for its parts, `length` for its number of tokens.

Invariants (tests/unit/verifiers): scores are between 0 and 1; the end of the sequence is no part of the text; only a
row without a usable target makes an answer fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.config.rewards import FormatReward, LengthReward
from megatron_rl.types import Tokenizer, Verdict
from megatron_rl.verifiers.answer import Answer, begins_closed, text_after


class FormatVerifier:
    """Looks at the whole answer. After a thought that was closed before, the right form is a text alone. The
    configuration refuses the reward without a delimiter."""

    def __init__(self, cfg: FormatReward, tokenizer: Tokenizer, delimiter: str) -> None:
        self._tokenizer, self._delimiter = tokenizer, delimiter
        self._opening = "<" + delimiter.removeprefix("</") if delimiter.startswith("</") else None

    def score(self, answers: Sequence[Answer]) -> list[Verdict]:
        faults = map(self._fault, answers)
        return [Verdict(1.0) if fault is None else Verdict(0.0, fault) for fault in faults]

    def _fault(self, answer: Answer) -> str | None:
        if answer.rollout.finish != "stop":
            return "cut by the length budget"
        whole = self._tokenizer.decode(answer.final_ids, skip_special_tokens=False)
        is_closed = begins_closed(answer, self._delimiter, self._tokenizer)
        if (count := whole.count(self._delimiter)) != (0 if is_closed else 1):
            return f"{count} times {self._delimiter}"
        thought = "" if is_closed else whole.partition(self._delimiter)[0].strip()
        text = text_after("" if is_closed else self._delimiter, answer.final_ids, self._tokenizer)
        if self._opening:
            thought = thought.removeprefix(self._opening)
            if self._opening in thought or self._opening in (text or ""):
                return f"{self._opening} inside the answer"
        if not is_closed and not thought.strip():
            return "no reasoning"
        return None if text and text.strip() else "an empty text"


class LengthVerifier:
    """Compares the number of tokens of an answer with its target."""

    def __init__(self, cfg: LengthReward, tokenizer: Tokenizer, delimiter: str) -> None:
        self._cfg = cfg

    def score(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [self._verdict(answer) for answer in answers]

    def _verdict(self, answer: Answer) -> Verdict:
        columns = answer.prompt.columns
        if fault := fault_of_target(self._cfg, columns):
            return Verdict(None, fault, failed=True)
        target = self._cfg.target_of(columns)
        return Verdict(max(0.0, 1 - abs(len(answer.response_ids) - target) / target))


def fault_of_target(cfg: LengthReward, columns: Mapping[str, Any]) -> str | None:
    """Why answers to a row with these columns have no target; None if they have one."""
    target = cfg.target_of(columns)
    if isinstance(target, int) and not isinstance(target, bool) and target > 0:
        return None
    return f"the length reward needs a number of tokens above 0 in the column {cfg.target!r}, but it is {target!r}"
