"""Rewards for parts of the reasoning, without a reward model: how much each makes the right answer more probable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.section import Section

if TYPE_CHECKING:
    from megatron_rl.config.schema import GrpoRunConfig

MARKERS = ("Wait,", "Alternatively,", "Actually,", "Hmm,", "Let me ", "I need to ", "So ", "But ")


class PrefixValues(Section):
    """The value of a prefix of the reasoning is the policy's mean log-prob of the tokens of the right answer after this
    prefix. The reward of a passage is the amount that it adds to this value. It is at the last token of the passage
    (`Rollout.token_rewards`, kind `utility`), for `adv_estimator: {kind: grpo_process}`."""

    rollouts: PositiveInt | None = None
    """The number of Monte Carlo answers (VinePPO, Kazemnejad et al. 2024, arXiv:2410.01679): the value of a prefix is
    the mean reward of this number of answers that continue it, and the prompt's is the mean reward of its group. This
    needs no right answer in the rows and has no bias, but the engine generates these extra answers for each passage.
    null: the log-prob of the right answer."""

    by: Literal["engine", "trainer"] = "engine"
    """Who computes the log-probs: the engine while it generates other answers, or the trainer before the update, in a
    separate forward pass, with the weights that are trained, also if the engine is quantised. `trainer` needs a
    synchronous run, without `rollout.max_lag`."""
    force: str = "\n</think>\n\nThe answer is "
    """The text between a prefix of the reasoning and the answer. It closes the reasoning."""
    column: str = "ground_truth"
    """The column with the right answer, as text or number, or with a list of right answers. A row without a right
    answer gets no passage rewards."""
    forced_tokens: PositiveInt = 128
    """The largest number of tokens of `force` and an answer together. The engine reserves room for them."""
    several: Literal["max", "logsumexp"] = "max"
    """The value if several answers are right: the largest of their values, or the logarithm of the sum of the
    exponentials."""
    floor: Annotated[float, Field(lt=0)] = -10.0
    """The smallest value, in nats a token."""
    scale: Literal["logp", "probability"] = "logp"
    """`logp`: the value is the mean log-prob of a token of the right answer. `probability`: it is the probability of
    the whole right answer, which equals the probability of the outcome reward 1 if the reasoning ended there."""
    markers: tuple[str, ...] = MARKERS
    """The texts that start a new passage, after white space."""
    min_tokens: PositiveInt = 16
    """The smallest number of tokens of a passage that a marker can end."""
    max_tokens: PositiveInt = 256
    """The largest number of tokens of a passage. A longer one is split, after a sentence if there is one."""
    positive_only: bool = False
    """true: a passage that lowers the value has the reward 0 instead of one below 0."""
    clip: PositiveFloat | None = None
    """The largest absolute reward of a passage; null means no bound."""
    idle_cost: NonNegativeFloat = 0.0
    """The penalty of a passage of `max_tokens` that changes the value by less than `idle_below`; a shorter one loses
    less, in proportion."""
    idle_below: NonNegativeFloat = 1e-3
    """The change of the value below which `idle_cost` applies."""

    def answers(self, columns: Mapping[str, Any]) -> list[str]:
        """The right answers of a row with these columns; none if it has none, or if none is needed.

        Raises:
            ValueError: an answer is neither text nor a number, or it is empty.
        """
        given = columns.get(self.column)
        if given is None or self.rollouts is not None:
            return []
        answers = given if isinstance(given, list | tuple) else [given]
        for answer in answers:
            if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
                raise ValueError(
                    f"column `{self.column}` has {answer!r}, but rollout.prefix_values needs text or a number there, "
                    "or a list of these"
                )
        return [str(answer) for answer in answers]

    @property
    def num_scored(self) -> int:
        """The largest number of tokens that the engine gets after a passage."""
        return 0 if self.rollouts is not None else self.forced_tokens

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}")
        of_answers = ("by", "force", "column", "forced_tokens", "several", "floor", "scale")
        for key in of_answers if self.rollouts is not None else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"with rollouts the values need no right answer, so {key} means nothing; remove it")
        if not all(self.markers):
            raise ValueError("markers has an empty text, with which every token would begin a passage; remove it")
        return self

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        rollout, estimator = run.rollout, run.algorithm.adv_estimator
        if not estimator.needs & {"token_rewards", "values"}:
            yield (
                f"rollout.prefix_values gives rewards at single tokens, which algorithm.adv_estimator {estimator.kind} "
                "does not use; choose grpo_process or gae, or remove rollout.prefix_values"
            )
        if self.by == "trainer" and rollout.overlaps:
            yield (
                "rollout.prefix_values.by is trainer, which computes values before a step's update, but with "
                "rollout.max_lag the answers are of older weights; set it to engine"
            )
        if rollout.beams:
            yield "rollout.prefix_values reward one reasoning and its answer, and rollout.beams has several answers"
        if rollout.environment and rollout.environment.kind == "agent":
            yield "rollout.prefix_values reward turns or reasoning, and an agent's calls may be neither"
        if self.rollouts and rollout.environment:
            yield (
                "rollout.prefix_values.rollouts begin in the middle of an answer, where no environment can begin; "
                "remove one of the two"
            )
        if not (rollout.delimiter or rollout.environment):
            yield "rollout.prefix_values reward reasoning, and with an empty rollout.delimiter there is none"
