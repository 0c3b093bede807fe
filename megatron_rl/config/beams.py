"""Beam search for items after the reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import PositiveInt, model_validator

from megatron_rl.config.section import Section

if TYPE_CHECKING:
    from megatron_rl.config.schema import GrpoRunConfig


class Beams(Section):
    """Answers in two stages, as in OpenOneRec (arXiv:2512.24762): the policy samples reasoning, then beam search finds
    the most probable items of a catalogue. An item is a fixed number of tokens (a semantic id). Each beam is one
    sample."""

    width: PositiveInt
    """The number of beams, which is also the number of items after each reasoning trace."""
    prefix: tuple[str, ...] = ()
    """The texts forced between the delimiter and the item, such as `["<item>"]`; each must be one token."""
    catalogue: Path
    """A JSON file with the list of all items. An item is a list of texts, such as `["<a_3>", "<b_0>", "<c_5>"]`. Each
    text must be one token, and all items must have the same number of texts. Beam search returns items of this list
    only."""
    candidates: PositiveInt = 256
    """The number of most probable tokens of the vocabulary that are considered after each beam; tokens that continue no
    item are removed. If too few remain, beams are lost, and `beams/missing` counts them. With a smaller vocabulary all
    tokens are considered."""

    @model_validator(mode="after")
    def _enough_candidates(self) -> Self:
        if self.width > self.candidates:
            raise ValueError(
                f"width is {self.width}, but the engine gives the log-probs of {self.candidates} tokens after a beam "
                "(candidates); lower width, or raise candidates"
            )
        return self

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        thinking, sampling = run.rollout.thinking, run.rollout.sampling
        if thinking is None or thinking.mode != "two_call":
            yield "rollout.beams needs reasoning with a budget of its own: set rollout.thinking with mode two_call"
        elif thinking.thought_tokens.smallest == 0:
            yield "rollout.beams needs reasoning, but rollout.thinking.thought_tokens may be 0; begin at 1"
        if sampling.top_p < 1 or sampling.top_k > 0:
            yield ("rollout.beams needs the engine's full distribution: set rollout.sampling.top_p to 1 and top_k to 0")
