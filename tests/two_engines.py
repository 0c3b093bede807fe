"""What a run with two engines has in common with a run that has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest import approx


def of_two_engines(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The metrics that a run must have whose answers come from two engines, from those of a run with one: each engine
    takes the weights, and computes other batches. On CPUs with matrix units the kernels round by the size of a batch,
    so that the engines' log-probs, and all that depends on them, may differ in the last bits."""
    return [
        {name: approx(value, rel=1e-4, abs=1e-6) for name, value in record.items()}
        | {"sync/bytes": 2 * record["sync/bytes"]}
        for record in records
    ]
