"""Shares from samples that are listed one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.types import Denominators, GroupSums, Share, TokenRewards, Tokens


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sample of a share; see `Share` for its fields."""

    name: str
    tokens: Tokens
    advantage: float
    weight: float
    index: int = 0
    token_rewards: tuple[tuple[int, float], ...] | None = None
    """(position, value) of each reward at a token; None if the estimator gives one number for each sample."""
    values: np.ndarray | None = None
    """float32 [L]: the critic's values; None if there is no critic."""
    entries: tuple[int, int, int] | None = None
    """`first`, `stop` and `size` of `GroupSums`; None if the estimator adds up nothing on the ranks."""


def share_of(
    minibatches: Sequence[Sequence[Sequence[TrainSample]]],
    denominators: Sequence[Denominators] = (),
    alignment: int = 1,
    version: int = 0,
) -> Share:
    """The share with these samples, as `[mini-batch][micro-batch][sample]`; one may be in several mini-batches."""
    samples, places = [], []
    for minibatch in minibatches:
        places.append([])
        for micro in minibatch:
            places[-1].append(tuple(range(len(samples), len(samples) + len(micro))))
            samples += micro
    entries = [sample.entries for sample in samples if sample.entries is not None]
    rewards = [(i, *reward) for i, sample in enumerate(samples) for reward in sample.token_rewards or ()]
    return Share(
        minibatches=tuple(map(tuple, places)),
        denominators=tuple(denominators),
        alignment=alignment,
        version=version,
        names=[sample.name for sample in samples],
        index=np.array([sample.index for sample in samples], np.int64),
        advantages=np.array([sample.advantage for sample in samples]),
        weights=np.array([sample.weight for sample in samples]),
        tokens=[sample.tokens for sample in samples],
        token_rewards=None
        if all(sample.token_rewards is None for sample in samples)
        else TokenRewards(
            np.array([sample for sample, _, _ in rewards], np.int64),
            np.array([position for _, position, _ in rewards], np.int64),
            np.array([value for _, _, value in rewards], np.float64),
        ),
        sums=GroupSums(*np.array(entries).T[:2], entries[0][2]) if entries else None,
        columns={"value": {s.index: s.values for s in samples}} if any(s.values is not None for s in samples) else {},
    )
