"""The metrics of items that beam search has found.

Invariant (tests/unit/loop): a thought has the same weight in them however many beams it has.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.types import Group, Metrics, Rollout


def thoughts_of(group: Group) -> list[list[Rollout]]:
    """The samples of each thought, the best beam first."""
    thoughts: list[list[Rollout]] = []
    for sample in group.rollouts:
        if sample.beam == 0:
            thoughts.append([])
        thoughts[-1].append(sample)
    return thoughts


def describe_beams(groups: Sequence[Group], width: int) -> Metrics:
    """`beams/ended_thoughts` is the number of thoughts without a search, because the model ended its answer in them.
    `beams/missing` is the number of beams that the searches of the others lost, because too few of the tokens that were
    looked at continue an item (`rollout.beams.candidates`)."""
    thoughts = [samples for group in groups for samples in thoughts_of(group)]
    ended = sum(samples[0].num_item_tokens == 0 and samples[0].finish == "stop" for samples in thoughts)
    num_items = sum(sample.num_item_tokens > 0 for samples in thoughts for sample in samples)
    return {
        "beams/ended_thoughts": float(ended),
        "beams/missing": float((len(thoughts) - ended) * width - num_items),
    }
