"""The memory of one GPU as a table: its parts, their bytes in each phase, and what makes each part smaller."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_rl.types import Phase

PHASES: tuple[Phase, ...] = ("training", "weight sync", "generating")
"""The columns of a table. A GPU on which a teacher scores has a table of its own."""
Bytes = tuple[float, float, float]
"""The bytes of a part in each of PHASES."""


class MemoryPart(NamedTuple):
    bytes: Bytes
    remedy: str
    """What the user can change to make it smaller, as the end of a sentence."""


def always(num_bytes: float) -> Bytes:
    """The bytes of a part that has the same size in every phase."""
    return (num_bytes, num_bytes, num_bytes)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of one GPU."""

    name: str
    """The rank or ranks that use the GPU."""
    parts: Mapping[str, Bytes]
    remedies: Mapping[str, str]
    """What makes a part smaller, by the same keys."""
    host: Mapping[str, float] = field(default_factory=dict)
    """The bytes that the rank keeps in the memory of its node, by what they are."""

    @classmethod
    def of(cls, name: str, parts: Mapping[str, MemoryPart], host: Mapping[str, float] | None = None) -> GpuMemory:
        """The table of those parts that have any bytes."""
        present = {part: value for part, value in parts.items() if max(value.bytes)}
        sizes = {part: value.bytes for part, value in present.items()}
        return cls(name, sizes, {part: value.remedy for part, value in present.items()}, host or {})

    @classmethod
    def together(cls, *sides: GpuMemory) -> GpuMemory:
        """All sides on one GPU."""
        keys = [(f"{one.name.partition(',')[0]}: {part}", one, part) for one in sides for part in one.parts]
        return cls(
            f"{'; '.join(one.name for one in sides[:-1])}, and {sides[-1].name}",
            {key: one.parts[part] for key, one, part in keys},
            {key: one.remedies[part] for key, one, part in keys},
        )

    def beside(self, name: str, part: MemoryPart, host: float) -> GpuMemory:
        """The same with a part of others on the GPU, and what they keep in the memory of the node."""
        parts, remedies = {**self.parts, name: part.bytes}, {**self.remedies, name: part.remedy}
        return replace(self, parts=parts, remedies=remedies, host={**self.host, name: host})

    @property
    def totals(self) -> Bytes:
        training, pushing, generating = (sum(sizes[phase] for sizes in self.parts.values()) for phase in range(3))
        return training, pushing, generating

    def sharing(
        self, present: Mapping[str, Collection[Phase]], *, copied: Collection[str] = (), to: str = "engines"
    ) -> GpuMemory:
        """The memory of a rank that shares its GPU, and gives parts up in some phases.

        Args:
            present: for each part that is given up, the phases when it is on the GPU. Other parts always are.
            copied: the parts that are copied to the node's memory while they are not on the GPU.
            to: whose memory it then is.
        """
        phases = {part: present.get(part, PHASES) for part in self.parts}
        parts = {part: _only(sizes, phases[part]) for part, sizes in self.parts.items()}
        lent = sum(self.parts[part][0] for part in copied if part in self.parts)
        return replace(self, parts=parts, host={**self.host, f"lent to the {to}": lent} if lent else self.host)


def _only(sizes: Bytes, phases: Collection[Phase]) -> Bytes:
    training, pushing, generating = (
        size if phase in phases else 0.0 for phase, size in zip(PHASES, sizes, strict=True)
    )
    return training, pushing, generating
