"""The thinking budget: the number of tokens that reasoning may have, and what happens when it is used up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from megatron_rl.config.section import Section, default_kind

if TYPE_CHECKING:
    from megatron_rl.config.schema import GrpoRunConfig


class FixedBudget(Section):
    """All reasoning has the same budget."""

    kind: Literal["fixed"] = "fixed"
    tokens: NonNegativeInt
    """The largest number of tokens of the reasoning. 0: the reasoning is closed before it begins."""

    @property
    def smallest(self) -> int:
        return self.tokens

    @property
    def largest(self) -> int:
        return self.tokens


class ColumnBudget(Section):
    """Every row has its own budget."""

    kind: Literal["column"] = "column"
    name: str
    """The column of the rows that has the number of tokens."""
    low: NonNegativeInt = 0
    """The smallest number that a row may have."""
    high: NonNegativeInt
    """The largest number that a row may have."""

    def of(self, columns: Mapping[str, Any]) -> int:
        """The budget of a row with these columns.

        Raises:
            ValueError: the column is missing, or has no integer within the bounds.
        """
        number = columns.get(self.name)
        if type(number) is not int or not self.low <= number <= self.high:
            raise ValueError(
                f"column `{self.name}` has {number!r}, but rollout.thinking.thought_tokens needs an integer from "
                f"{self.low} to {self.high} there"
            )
        return number

    @property
    def smallest(self) -> int:
        return self.low

    @property
    def largest(self) -> int:
        return self.high


class UniformBudget(Section):
    """Budgets are drawn; all numbers from `low` to `high` are equally probable."""

    kind: Literal["uniform"] = "uniform"
    low: NonNegativeInt
    """The smallest budget in tokens."""
    high: NonNegativeInt
    """The largest budget in tokens."""
    per: Literal["prompt", "sample"] = "sample"
    """`prompt`: all answers to a prompt have the same budget. `sample`: each answer has its own, so that the answers of
    a group are compared although they had more or less room."""

    @property
    def smallest(self) -> int:
        return self.low

    @property
    def largest(self) -> int:
        return self.high


class ScheduledBudget(Section):
    """The budget depends on the training step."""

    kind: Literal["schedule"] = "schedule"
    tokens: dict[NonNegativeInt, NonNegativeInt]
    """The budgets in tokens, each by its first step, such as `{0: 4096, 100: 2048}`. Step 0 must have one."""

    def at(self, step: int) -> int:
        return self.tokens[max(begin for begin in self.tokens if begin <= step)]

    @property
    def smallest(self) -> int:
        return min(self.tokens.values())

    @property
    def largest(self) -> int:
        return max(self.tokens.values())

    @model_validator(mode="after")
    def _begins_at_0(self) -> Self:
        if 0 not in self.tokens:
            raise ValueError(f"tokens has no budget for step 0, only for {sorted(self.tokens)}; add one")
        return self


class QuantileBudget(Section):
    """The budget is a quantile of the lengths of reasoning that led to right answers (see `eval.verifier`) and that no
    budget cut. Such reasoning is never longer than its budget, so the budget cannot rise above the budgets of these
    steps; `low` bounds its fall."""

    kind: Literal["quantile"] = "quantile"
    quantile: Annotated[float, Field(gt=0, le=1)]
    """The share of this reasoning that fits into the budget."""
    low: NonNegativeInt
    """The smallest budget in tokens."""
    high: NonNegativeInt
    """The largest budget in tokens."""
    start: NonNegativeInt
    """The budget in tokens until there is such reasoning."""
    num_steps: PositiveInt = 8
    """The number of last steps whose reasoning is used."""

    @property
    def smallest(self) -> int:
        return self.low

    @property
    def largest(self) -> int:
        return self.high

    @model_validator(mode="after")
    def _start_is_within(self) -> Self:
        if not self.low <= self.start <= self.high:
            raise ValueError(f"start is {self.start}, which is not within low ({self.low}) and high ({self.high})")
        return self


ThoughtTokens = Annotated[
    Annotated[
        FixedBudget | ColumnBudget | UniformBudget | ScheduledBudget | QuantileBudget, Field(discriminator="kind")
    ],
    BeforeValidator(lambda value: {"kind": "fixed", "tokens": value} if isinstance(value, int) else value),
    default_kind("fixed"),
]


class ThinkingBudget(Section):
    """Separate token budgets for the reasoning and for the answer.

    The reasoning is the text sampled before the delimiter (`rollout.delimiter`). Tokens that are appended to close
    it are no actions. A prompt that already closes the reasoning has no budget."""

    mode: Literal["two_call", "truncate", "native"] = "two_call"
    """What happens to reasoning that reaches `thought_tokens` without a delimiter. `two_call`: `closing` is appended,
    and a second call of the engine samples the answer. `native`: vLLM's own budget forces `closing` in one call; an
    answer that does not keep its budget ends the run. `truncate`: the sample ends there and counts as cut;
    `algorithm.overlong_filter` keeps or removes it."""
    thought_tokens: ThoughtTokens
    """The largest number of sampled tokens of the reasoning, its own delimiter included: one number for all, or a
    section that says how the budget of an answer is chosen. Evaluations and greedy answers have the budget of their row
    with `column`, and otherwise the largest one."""
    response_tokens: PositiveInt
    """The largest number of answer tokens, counted after the delimiter."""
    closing: str | None = None
    """The text that closes the reasoning, such as `Considering the limited time, I answer now. </think>`. It ends with
    `rollout.delimiter`. null means the delimiter alone."""
    opening: str = "<think>"
    """The token that opens the reasoning in the chat template. Only `native` needs it: vLLM counts from there, and a
    prompt without it is refused."""

    def of_row(self, columns: Mapping[str, Any]) -> int:
        """The budget of an answer that got no other one.

        Args:
            columns: the columns of the prompt's row.

        Raises:
            ValueError: the row should have a budget of its own, and does not.
        """
        tokens = self.thought_tokens
        return tokens.of(columns) if isinstance(tokens, ColumnBudget) else tokens.largest

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        tokens = self.thought_tokens
        if tokens.smallest > tokens.largest:
            raise ValueError(f"thought_tokens: low is {tokens.smallest}, above high, which is {tokens.largest}")
        if self.mode == "truncate" and tokens.smallest == 0:
            raise ValueError(
                "thought_tokens may be 0, but with mode truncate such an answer would have no token; begin at 1"
            )
        if self.mode == "truncate" and self.closing is not None:
            raise ValueError("closing closes the reasoning, and with mode truncate the sample ends there; remove it")
        return self

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        delimiter, most = run.rollout.delimiter, run.rollout.max_response_tokens
        environment = run.rollout.environment
        if environment is not None and environment.kind == "agent":
            yield (
                "rollout.thinking is a budget for turns, but the calls of rollout.environment's agent have none; set "
                "rollout.thinking to null"
            )
        elif environment is not None and self.mode == "truncate":
            yield (
                "rollout.thinking.mode truncate would end the answer in the first turn whose reasoning is cut, without "
                "a reaction of rollout.environment; choose two_call or native"
            )
        if not delimiter:
            yield "rollout.thinking needs rollout.delimiter, the text that ends the reasoning; set it"
        elif self.closing is not None and not self.closing.endswith(delimiter):
            yield (
                f"rollout.thinking.closing {self.closing!r} must end with rollout.delimiter {delimiter!r}, or the "
                "reasoning would go on"
            )
        longest, needs_delimiter = self.thought_tokens.largest, self.mode != "truncate"
        needed = longest + self.response_tokens + needs_delimiter
        if needed > most:
            yield (
                f"rollout.max_response_tokens ({most}) is below {needed}, which is the largest of "
                f"thinking.thought_tokens ({longest}) + thinking.response_tokens ({self.response_tokens})"
                + (" + at least 1 for the delimiter" if needs_delimiter else "")
                + "; raise it"
            )
        if isinstance(self.thought_tokens, QuantileBudget) and not run.deciding_rewards:
            yield (
                "rollout.thinking.thought_tokens of kind quantile follows the reasoning of right answers, but no "
                "reward says which answers are right; name one in eval.verifier"
            )
