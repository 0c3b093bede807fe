"""Beam search for items after a thought.

The engine has no beam search of its own. It is asked for one token after each beam, and what counts of its answer are
the log-probs of the most probable tokens, over the full distribution at the sampling temperature, as for all other
actions. Tokens that continue no item of the catalogue are removed afterwards. If the engine left them out, it would
give other log-probs than the trainer.

Invariants (tests/unit/rollout): every found item is one of the catalogue; if no candidate is lost, the beams of each
length are the `width` most probable beginnings of items that continue the previous beams; the sum of the
log-probs decides, and of equal ones the smaller tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from pathlib import Path

import numpy as np

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.models import read_shape
from megatron_rl.rollout.program import Call, Completion, Samples, Transcript, as_rollout, find_delimiter
from megatron_rl.rollout.programs.catalogue import Catalogue, read_catalogue
from megatron_rl.rollout.vocabulary import single_ids


@dataclass(frozen=True, slots=True)
class Beam:
    """The beginning of an item."""

    ids: tuple[int, ...] = ()
    logp: tuple[float, ...] = ()
    """The log-prob of each token."""
    version: tuple[int, ...] = ()
    """The version of the weights that gave each token's log-prob."""
    routes: np.ndarray | None = None
    """The experts of all tokens but the last one; see `Completion.routes`."""

    def with_token(self, token: int, logp: float, completion: Completion) -> Beam:
        [version] = completion.version
        return Beam((*self.ids, token), (*self.logp, logp), (*self.version, version), completion.routes)


def best(beams: Iterable[Beam], width: int) -> list[Beam]:
    """The most probable beams, the best one first.

    Example: of the log-probs (-1, -2), (-.5, -3) and (-2, -.5) with width 2, the last one (-2.5) and the first one (-3)
    remain.
    """
    return nsmallest(width, beams, key=lambda beam: (-sum(beam.logp), beam.ids))


class BeamSearch:
    """
    Args:
        width: the number of beams.
        prefix: the tokens that are forced before an item.
        num_candidates: the number of most probable tokens that the engine gives after a beam.
    """

    def __init__(self, catalogue: Catalogue, width: int, prefix: tuple[int, ...], num_candidates: int) -> None:
        self._catalogue, self._width = catalogue, width
        self.prefix = prefix
        self.num_tokens = catalogue.num_tokens
        """The number of an item's tokens, which is also the number of rounds of a search."""
        self.call = Call(1, num_candidates=num_candidates)
        """What the engine is asked after each beam."""

    @classmethod
    def of(cls, folder: Path, rollout: RolloutConfig) -> BeamSearch:
        """The search of a configuration.

        Args:
            folder: the model's.

        Raises:
            ValueError: prefix or catalogue do not fit the tokenizer, the catalogue has fewer items than there are
                beams, or `rollout.thinking.response_tokens` has another number.
        """
        beams, thinking = rollout.beams, rollout.thinking
        assert beams is not None and thinking is not None, "the configuration was validated"
        prefix = tuple(single_ids(folder, beams.prefix, "rollout.beams.prefix"))
        catalogue = read_catalogue(beams.catalogue, folder)
        if beams.width > catalogue.num_items:
            raise ValueError(
                f"rollout.beams.width is {beams.width}, but {beams.catalogue} has {catalogue.num_items} items, so that "
                "beams would always be missing; lower it"
            )
        needed = len(prefix) + catalogue.num_tokens
        if thinking.response_tokens != needed:
            raise ValueError(
                f"rollout.thinking.response_tokens is {thinking.response_tokens}, but with rollout.beams an answer has "
                f"{len(prefix)} tokens of the prefix + {catalogue.num_tokens} of an item = {needed}; set it to {needed}"
            )
        return cls(catalogue, beams.width, prefix, min(beams.candidates, read_shape(folder).vocab_size))

    def begin(self, transcript: Transcript, delimiter: Sequence[int]) -> list[Beam]:
        """Force the prefix after a thought. Returns one empty beam, or no beam if the model ended its answer within the
        thought."""
        if find_delimiter(transcript.ids, delimiter) is None:
            return []
        transcript.force(self.prefix)
        return [Beam()]

    def extended(self, beams: Sequence[Beam], completions: Sequence[Completion]) -> list[Beam]:
        """The beams that are one token longer, at most `width`, the best one first.

        Args:
            completions: what the engine gave after each beam.
        """
        longer = (
            beam.with_token(token, completion.candidates[token], completion)
            for beam, completion in zip(beams, completions, strict=True)
            for token in self._catalogue.following(beam.ids) & completion.candidates.keys()
            if completion.candidates[token] > -np.inf
        )
        return best(longer, self._width)


def as_rollouts(
    prompt_ids: Sequence[int],
    transcript: Transcript,
    delimiter: Sequence[int],
    thought_budget: int | None,
    beams: Sequence[Beam],
) -> Samples:
    """The answers of one thought: one for each beam, or one without an item if there is no beam.

    Args:
        transcript: the thought, and the prefix if a search has begun.
        beams: the best one first. Its sample alone has the thought's actions.

    Example: a prompt of 2 tokens, a thought of 2, the delimiter and the prefix, and two beams of 2 tokens:
        beam 0  ids [11 12 | 21 22 | 3 | 4 | 31 32]  action_mask [0 0 | 1 1 | 1 | 0 | 1 1]
        beam 1  ids [11 12 | 21 22 | 3 | 4 | 31 33]  action_mask [0 0 | 0 0 | 0 | 0 | 1 1]
    """
    if not beams:
        return [as_rollout(prompt_ids, transcript, delimiter, thought_budget)]
    samples = []
    for rank, beam in enumerate(beams):
        size = len(beam.ids)
        whole = Transcript(
            [*transcript.ids, *beam.ids],
            transcript.is_action + [True] * size,
            [*transcript.logp, *beam.logp],
            [*transcript.version, *beam.version],
            beam.routes,
            stopped=True,
        )
        if rank > 0:
            whole.disown(range(len(transcript.ids)))
        sample, tokens = as_rollout(prompt_ids, whole, delimiter, None if rank else thought_budget)
        samples.append((replace(sample, beam=rank, num_item_tokens=size), tokens))
    return samples
