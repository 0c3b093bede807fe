"""Fills parameters and the optimizer's state with what a checkpoint holds of them, on any mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from megatron_rl.convert.pieces import interval_boxes, interval_view
from megatron_rl.convert.source import Source
from megatron_rl.convert.tensor_files import Maps
from megatron_rl.models import Shard
from megatron_rl.models.shards import intersect, translate


class Target(NamedTuple):
    """What a rank reads: the flat interval of a parameter, of its fp32 copy or of one of its moments."""

    kind: str
    local_name: str
    extents: tuple[int, ...]
    """The extents of the whole parameter."""
    start: int
    """The index of the interval's first element in the parameter."""
    flat: Tensor


def fill(target: Target, shards: Iterable[Shard], source: Source, maps: Maps) -> None:
    """Fill a target with what a checkpoint holds of it, and its other elements (padding) with zeros.

    Args:
        shards: the shards of the target's parameter.

    Raises:
        ValueError: a tensor has other bytes than the manifest says.
    """
    target.flat.zero_()
    boxes = interval_boxes(target.extents, target.start, target.start + len(target.flat))
    for shard in shards:
        for local_box in (common for box in boxes if (common := intersect(shard.local_box, box))):
            hf_box = translate(local_box, shard.local_box, shard.hf_box)
            for region in source.regions[shard.hf_name]:
                if common := intersect(hf_box, region.hf_box):
                    here = interval_view(
                        target.flat, target.start, target.extents, translate(common, hf_box, local_box)
                    )
                    here.copy_(maps.values(region.stored)(translate(common, region.hf_box, region.box)))
