"""The engine's side as recorded from its own loaders: turns views of tensors into rectangles, and the shards of a rank
into rows that layers share.

Invariants (tests/unit/layout): the rectangle of a view holds the elements of the view in their order; a recording
returns the shards that it was made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from megatron_rl.models.family import Family
from megatron_rl.models.placement import Placed, Placement
from megatron_rl.models.shards import Box, Shard


def box_of_view(offset: int, sizes: Sequence[int], strides: Sequence[int], full: Sequence[int]) -> Box | None:
    """The rectangle of a contiguous tensor that a view of it is.

    Args:
        offset, sizes, strides: the view as PyTorch describes it: its first element, and its strides in elements.
        full: the extents of the whole tensor.

    Returns:
        The rectangle that has the view's elements, in their order. None if there is no such rectangle, for example
        because the view is transposed.
    """
    if not prod(sizes):
        return None
    dims: list[tuple[int, int]] = []  # dims that lie in memory as one are one here
    for size, stride in zip(sizes, strides, strict=True):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size > 1:
            dims.append((size, stride))
    box, stride = [], 1
    for length in reversed(full):
        start, size = offset // stride % length, 1
        if dims and dims[-1][1] == stride and length > 1:
            size, _ = dims.pop()
            if size > length:
                if size % length:
                    return None
                dims.append((size // length, stride * length))
                size = length
        if start + size > length:
            return None
        box.append((start, start + size))
        stride *= length
    return tuple(reversed(box)) if not dims and offset < stride else None


_Key = tuple[str, str, str]
"""(prefix of the HF names, prefix of the local names, the rest of the local name)."""
_Pieces = list[tuple[str, Box, Box]]


@dataclass(frozen=True)
class Recording:
    """What one rank of an engine holds. JSON can hold it: layers refer to the placements that they have in common."""

    placements: tuple[Placement, ...]
    rows: tuple[tuple[str, str, int], ...]
    """(prefix of the HF names, prefix of the local names, index of the placement), in the order of loading."""
    repacked: bool = False
    """Whether vLLM repacks some of the layers when their weights have come."""

    @property
    def placed(self) -> list[Placed]:
        return [Placed(self.placements[index], hf_prefix, prefix) for hf_prefix, prefix, index in self.rows]

    @property
    def shards(self) -> list[Shard]:
        return [shard for placed in self.placed for shard in placed.shards()]

    @classmethod
    def of(cls, shards: Iterable[Shard], family: Family) -> Recording:
        """
        Raises:
            ValueError: an expert has a parameter of its own, or the experts of a parameter do not follow each other.
        """
        names = _Names(family)
        found: dict[_Key, dict[int | None, _Pieces]] = {}
        places: dict[_Key, dict[int, int]] = {}  # of each expert in its parameter
        for shard in shards:
            hf_prefix, prefix, kind, expert = names.split(shard)
            key, box = (hf_prefix, prefix, shard.local_name.removeprefix(prefix)), shard.local_box
            if expert is not None:
                if len(box) == len(shard.hf_box):
                    raise ValueError(f"vLLM holds {shard.hf_name} in {shard.local_name}, without a dim for the experts")
                places.setdefault(key, {})[expert], box = box[0][0], box[1:]
            found.setdefault(key, {}).setdefault(expert, []).append((kind, shard.hf_box, box))
        placements: dict[Placement, int] = {}
        rows = []
        for (hf_prefix, prefix, local_name), by_expert in found.items():
            pieces = tuple(sorted(next(iter(by_expert.values()))))
            experts = None
            if place := places.get((hf_prefix, prefix, local_name)):
                experts = min(place), max(place) + 1
                alike = all(tuple(sorted(others)) == pieces for others in by_expert.values())
                if not alike or place != {expert: index for index, expert in enumerate(range(*experts))}:
                    raise ValueError(
                        f"{prefix}{local_name}: the experts {sorted(place)} do not lie one after the other, as vLLM's "
                        "linear placement has them"
                    )
            float32 = family.is_sent_as_float32(hf_prefix + pieces[0][0])
            placement = Placement(local_name, pieces, experts, float32)
            rows.append((hf_prefix, prefix, placements.setdefault(placement, len(placements))))
        return cls(tuple(placements), tuple(rows))


class _Names:
    """Cuts names into the parts that the rows of a family's table have."""

    def __init__(self, family: Family) -> None:
        self._layer = re.compile(re.escape(family.hf_layer).replace(re.escape("{}"), r"(\d+)"))
        kinds = dict.fromkeys(tensor.name for rule in family.rules if rule.per_expert for tensor in rule.hf)
        self._kinds = [(kind, re.compile(re.escape(kind).replace(re.escape("{}"), r"(\d+)"))) for kind in kinds]

    def split(self, shard: Shard) -> tuple[str, str, str, int | None]:
        """(prefix of the HF name, prefix of the local name, the HF name's rest, the number of the expert)."""
        layer = self._layer.match(shard.hf_name)
        if layer is None:
            return "", "", shard.hf_name, None
        place = re.search(rf"(?:^|\.){layer[1]}\.", shard.local_name)
        prefix, rest = shard.local_name[: place.end()] if place else "", shard.hf_name[layer.end() :]
        for kind, pattern in self._kinds:
            if expert := pattern.fullmatch(rest):
                return layer[0], prefix, kind, int(expert[1])
        return layer[0], prefix, rest, None
