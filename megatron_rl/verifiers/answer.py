"""The form in which a verifier receives a sample, and the tokenizer with which it decodes the sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.types import Prompt


class Tokenizer(Protocol):
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: Prompt
    response_ids: list[int]
    """All tokens after the prompt: thought, delimiter, answer and end of sequence."""
    finish: str
    """`stop` if the model ended its answer, `length` if a budget cut it."""
