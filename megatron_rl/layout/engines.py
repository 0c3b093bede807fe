"""Who receives: equal engines, and who of them feeds whom.

Invariants (tests/unit/layout): chains partition the engines; each engine is fed once, by the trainer or by another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Feed(NamedTuple):
    """Each rank of an engine sends all its weights to the same rank of another, as they arrive."""

    round: int
    """1 is the engine after a chain's first, which the trainer feeds in round 0."""
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Engines:
    """Equal engines of tensor x pipeline ranks, tensor first."""

    num: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert_parallel: bool = False
    """vLLM's enable_expert_parallel: the experts are shared out over the tensor ranks."""
    num_chains: int | None = None
    """Engines are fed in so many chains: the trainer feeds the first of each, each engine the next. None: the trainer
    feeds all."""

    def __post_init__(self) -> None:
        if min(self.num, self.tensor, self.pipeline) < 1:
            raise ValueError(f"{self}: every size is at least 1")
        if not 1 <= self.heads <= self.num:
            raise ValueError(f"{self}: {self.num} engines make at most {self.num} chains")

    @property
    def world_size(self) -> int:
        """Ranks of one engine."""
        return self.tensor * self.pipeline

    @property
    def heads(self) -> int:
        """Engines that the trainer feeds."""
        return self.num if self.num_chains is None else self.num_chains

    @property
    def chains(self) -> list[range]:
        """Neighbours follow each other: those of one node feed each other inside it."""
        ends = [i * self.num // self.heads for i in range(self.heads + 1)]
        return [range(start, stop) for start, stop in zip(ends, ends[1:])]

    def chain_of(self, engine: int) -> range:
        assert 0 <= engine < self.num, f"{self} has no engine {engine}"
        return next(chain for chain in self.chains if engine in chain)

    @property
    def feeds(self) -> list[Feed]:
        """In the order of their rounds."""
        return sorted(Feed(hop, chain[hop - 1], chain[hop]) for chain in self.chains for hop in range(1, len(chain)))
