"""Reward shaping: one section for each kind. A section states its formula and its source. r is a sample's reward."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.section import Method


class SoftOverlongShaping(Method):
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476)."""

    formula: ClassVar[str] = (
        "r + p, with p = 0 up to length max - cache, then p = ((max - cache) - length) / cache, and p = -1 beyond max"
    )
    source: ClassVar[str] = "arXiv:2503.14476 eq. 13"

    kind: Literal["soft_overlong"] = "soft_overlong"
    max_tokens: PositiveInt
    """The response length, in tokens, at and above which the penalty is -1; usually rollout.max_response_tokens."""
    cache_tokens: PositiveInt
    """The number of tokens below max_tokens where the penalty grows from 0 to -1."""

    @model_validator(mode="after")
    def _cache_fits(self) -> SoftOverlongShaping:
        if self.cache_tokens >= self.max_tokens:
            raise ValueError(
                f"cache_tokens ({self.cache_tokens}) must be below max_tokens ({self.max_tokens}), because otherwise "
                f"every answer would be penalised"
            )
        return self

    @property
    def first_penalised(self) -> int:
        """The length, in tokens, of the shortest answer with a penalty."""
        return self.max_tokens - self.cache_tokens + 1


class LengthNormalisedShaping(Method):
    """Kimi k1.5's length reward (Kimi team 2025, arXiv:2501.12599): it prefers the shorter answers of a group."""

    formula: ClassVar[str] = (
        "r + weight x l, l = 0.5 - (length - shortest) / (longest - shortest) in the group; min(0, l) for wrong answers"
    )
    source: ClassVar[str] = "arXiv:2501.12599 section 2.3.3"

    kind: Literal["length_normalised"] = "length_normalised"
    weight: PositiveFloat = 1.0
    """The factor of the length reward."""
    correct_threshold: float = 0.5
    """An answer is correct if its verified reward is at least this."""


class CosineShaping(Method):
    """Cosine-scaled reward (Yeo et al. 2025, arXiv:2502.03373), which replaces the verified reward.

    The reward depends on the length of the answer: along half a cosine it goes from one value at length 0 to another
    value at max_tokens. Correct and wrong answers have different pairs of values."""

    formula: ClassVar[str] = (
        "at_max + (at_zero - at_max) (1 + cos(pi length / max)) / 2, with the values for correct or for wrong answers; "
        "`exceeding` from length max on"
    )
    source: ClassVar[str] = "arXiv:2502.03373"

    kind: Literal["cosine"] = "cosine"
    max_tokens: PositiveInt
    """The length of a response, in tokens, at which the cosine ends; usually rollout.max_response_tokens."""
    correct_at_zero: float = 2.0
    """The reward of a correct answer at length 0."""
    correct_at_max: float = 1.0
    """The reward of a correct answer just below max_tokens."""
    wrong_at_zero: float = -10.0
    """The reward of a wrong answer at length 0."""
    wrong_at_max: float = 0.0
    """The reward of a wrong answer just below max_tokens."""
    exceeding: float = -10.0
    """The reward of an answer of max_tokens or more, whether it is correct or wrong."""
    correct_threshold: float = 0.5
    """An answer is correct if its verified reward is at least this."""


class RepetitionShaping(Method):
    """A penalty for repeated n-grams of token ids (Yeo et al. 2025, arXiv:2502.03373; Open-R1)."""

    formula: ClassVar[str] = "r + max_penalty (1 - distinct n-grams / n-grams)"
    source: ClassVar[str] = "arXiv:2502.03373; the form as a sum is Open-R1's"

    kind: Literal["repetition"] = "repetition"
    ngram_size: PositiveInt = 40
    """The length of an n-gram, in tokens."""
    max_penalty: Annotated[float, Field(lt=0)] = -1.0
    """The penalty, below 0, of a response whose n-grams are (almost) all repeated."""


ShapingConfig = Annotated[
    SoftOverlongShaping | LengthNormalisedShaping | CosineShaping | RepetitionShaping, Field(discriminator="kind")
]
