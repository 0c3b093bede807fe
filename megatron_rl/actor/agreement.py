"""Numbers and errors that all trainer ranks share.

A rank that raises alone leaves the others waiting in their next collective; so what can fail on one rank
fails on all, with the same words. Everything here is a collective over all trainer ranks, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.actor import platform
from megatron_rl.algorithms.objective import Metric
from megatron_rl.types import Metrics

_REDUCTIONS = {"sum": sum, "max": max, "min": min}


class Agreement:
    def __init__(self):
        self.group = dist.group.WORLD
        if dist.get_backend() != "gloo":
            self.group = dist.new_group(backend="gloo", timeout=platform.TIMEOUT)
        self.rank = dist.get_rank()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def require_none(self, problems: Sequence[str]) -> None:
        """Raises ValueError on every rank, with the same text, when any rank names a problem."""
        _raise(self.gather(list(problems)))

    @contextmanager
    def on_errors(self) -> Iterator[None]:
        """What raises ValueError or OSError inside the block on any rank raises ValueError on all at its end.
        The block itself holds no collective."""
        problems = []
        try:
            yield
        except (ValueError, OSError) as error:
            problems.append(str(error))
        self.require_none(problems)

    def reduce(self, reports: Sequence[dict[str, Metric]], problems: Sequence[str] = ()) -> Metrics:
        """One number a metric from the micro-batches of all ranks; raises as `require_none` does."""
        local: dict[str, tuple[str, float]] = {}
        names = [(name, metric) for report in reports for name, metric in report.items()]
        # One transfer from the device for all of them.
        values = torch.stack([metric.value.double() for _, metric in names]).tolist() if names else []
        for (name, metric), value in zip(names, values):
            known = [local[name][1]] if name in local else []
            local[name] = metric.reduction, _REDUCTIONS[metric.reduction]([*known, value])
        rows = self.gather((local, list(problems)))
        _raise([problems for _, problems in rows])
        total: dict[str, float] = {}
        for row, _ in rows:
            for name, (reduction, value) in row.items():
                total[name] = _REDUCTIONS[reduction]([total[name], value]) if name in total else value
        return total


def _raise(problems: Sequence[Sequence[str]]) -> None:
    distinct = list(dict.fromkeys(problem for of_rank in problems for problem in of_rank))
    if distinct:
        more = f" (and {len(distinct) - 3} more)" if len(distinct) > 3 else ""
        raise ValueError("; ".join(distinct[:3]) + more)
