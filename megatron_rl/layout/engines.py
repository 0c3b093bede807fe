"""The engines that receive weights, and which of them feed others.

Invariants (tests/unit/layout): chains partition the engines; the trainer or exactly one other engine feeds each engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Feed(NamedTuple):
    """Each rank of the source engine sends all its weights to the same rank of the destination engine, as they
    arrive."""

    round: int
    """The number of engines before the destination in its chain. The trainer feeds the first engine of a chain in round
    0."""
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Engines:
    """A number of equal engines. Each has tensor x pipeline ranks, and ranks are numbered along the tensor axis
    first."""

    num: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert_parallel: bool = False
    """vLLM's enable_expert_parallel: the experts are distributed over the tensor ranks."""
    num_chains: int | None = None
    """The number of chains of engines. The trainer feeds the first engine of each chain, and each engine feeds the next
    one. None: the trainer feeds every engine."""

    def __post_init__(self) -> None:
        if min(self.num, self.tensor, self.pipeline) < 1:
            raise ValueError(f"{self}: every size must be at least 1")
        if not 1 <= self.heads <= self.num:
            raise ValueError(f"{self}: the number of chains must be between 1 and the {self.num} engines")

    @property
    def world_size(self) -> int:
        """The number of ranks of one engine."""
        return self.tensor * self.pipeline

    @property
    def heads(self) -> int:
        """The number of engines that the trainer feeds: one for each chain."""
        return self.num if self.num_chains is None else self.num_chains

    @property
    def are_chained(self) -> bool:
        """Whether an engine feeds another one."""
        return self.heads < self.num

    @property
    def chains(self) -> list[range]:
        """The engines of each chain. Engines with neighbouring numbers follow each other, so that most feeds stay
        inside a node."""
        ends = [i * self.num // self.heads for i in range(self.heads + 1)]
        return [range(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]

    def chain_of(self, engine: int) -> range:
        """The engines of the chain that `engine` belongs to."""
        assert 0 <= engine < self.num, f"{self} has no engine {engine}"
        return next(chain for chain in self.chains if engine in chain)

    @property
    def feeds(self) -> list[Feed]:
        """All feeds from engine to engine, sorted by round."""
        return sorted(Feed(hop, chain[hop - 1], chain[hop]) for chain in self.chains for hop in range(1, len(chain)))
