"""The metrics of one scoring from those of its parts."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.types import Metrics


def merged(parts: Sequence[Metrics], sizes: Sequence[int]) -> Metrics:
    """Times and counts add up; `reward/<name>/failed`, a share of the answers, is weighted by the parts' sizes.

    Args:
        sizes: the number of answers of each part.
    """
    total: Metrics = {}
    for part, size in zip(parts, sizes, strict=True):
        for name, value in part.items():
            weight = size / sum(sizes) if name.endswith("/failed") else 1.0
            total[name] = total.get(name, 0.0) + weight * value
    return total
