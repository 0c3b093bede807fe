"""The metrics of one scoring, merged from its parts' metrics."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.types import Metrics


def merged(parts: Sequence[Metrics], sizes: Sequence[int]) -> Metrics:
    """Times and counts add up. Of `reward/<name>/failed`, a share of the answers, and of what a reward has logged, the
    result is the mean over the parts that have it, weighted by their sizes. The share does not depend on the parts.

    Args:
        sizes: the number of answers of each part.
    """
    total: Metrics = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        found = [(part[name], size) for part, size in zip(parts, sizes, strict=True) if name in part]
        if name.startswith("reward/") and name.endswith("/failed"):
            total[name] = sum(round(value * size) for value, size in found) / sum(size for _, size in found)
        elif name.startswith("reward/") and not name.endswith("/seconds"):
            total[name] = sum(value * size for value, size in found) / sum(size for _, size in found)
        else:
            total[name] = sum(value for value, _ in found)
    return total
