"""What a verifier is shown of one sample, and the tokenizer that it reads it with."""

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
    """Everything after the prompt: thought, delimiter, answer, end of sequence."""
    finish: str
    """`stop` or `length`, as in `Sample`."""
