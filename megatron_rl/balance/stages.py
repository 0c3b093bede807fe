"""Distributes the layers of a model over the parts of a pipeline: its stages, or its virtual stages.

The pipeline is as slow as its slowest part, so the largest FLOPs are minimised; among equals the largest number of
parameters is. Invariants (tests/unit/balance): every part has a layer; the two numbers equal the result of a search
through all distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Load(NamedTuple):
    """The cost of a layer, the embedding or the head for the pipeline part that holds it."""

    flops: float
    parameters: float


def distribute_layers(layers: Sequence[Load], first: Load, last: Load, num_parts: int) -> tuple[int, ...]:
    """The number of layers of each part, in order of depth.

    Args:
        first: what the first part holds besides its layers: the embedding.
        last: what the last part holds besides its layers: the output layer.

    Raises:
        ValueError: there are more parts than layers.
    """
    if num_parts > len(layers):
        raise ValueError(
            f"the model has {len(layers)} layers, too few for {num_parts} parts of a pipeline; lower "
            f"policy.parallel.pipeline or policy.parallel.virtual"
        )

    def load_of(values: Sequence[float], at_first: float, at_last: float) -> Callable[[int, int, int], float]:
        before = [0.0, *accumulate(values)]

        def load(part: int, start: int, stop: int) -> float:
            ends = (at_first if part == 0 else 0.0) + (at_last if part == num_parts - 1 else 0.0)
            return before[stop] - before[start] + ends

        return load

    flops = load_of([layer.flops for layer in layers], first.flops, last.flops)
    parameters = load_of([layer.parameters for layer in layers], first.parameters, last.parameters)
    largest, _ = _partition(len(layers), num_parts, flops)
    allowed = largest * (1 + 1e-9)  # sums of floating-point numbers

    def among_equals(part: int, start: int, stop: int) -> float:
        return parameters(part, start, stop) if flops(part, start, stop) <= allowed else math.inf

    return _partition(len(layers), num_parts, among_equals)[1]


def _partition(
    num_layers: int, num_parts: int, load: Callable[[int, int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Cut the layers into consecutive parts such that the largest load is the smallest possible. Returns the load and
    the number of layers of each part.

    The best cut of the first `stop` layers into `part` + 1 parts follows from the best cuts of fewer layers into `part`
    parts.
    """
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ())] + [None] * num_layers
    for part in range(num_parts):
        longer: list[tuple[float, tuple[int, ...]] | None] = [None] * (num_layers + 1)
        for stop in range(part + 1, num_layers + 1):
            found = (
                (max(known[0], load(part, start, stop)), (*known[1], stop - start))
                for start in range(part, stop)
                if (known := best[start]) is not None
            )
            longer[stop] = min(found, default=None)
        best = longer
    result = best[num_layers]
    assert result is not None
    return result
