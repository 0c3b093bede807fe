"""Numbers and errors that all trainer ranks share.

If one rank alone raised an error, the others would wait in their next collective. So an error on one rank is raised on
all of them, with the same message. Everything of `Agreement` is a collective over all trainer ranks, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl import spans
from megatron_rl.algorithms.objective import Metric
from megatron_rl.types import Metrics

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}


class Agreement:
    def __init__(self, timeout: timedelta) -> None:
        self.group = dist.group.WORLD
        if dist.get_backend() != "gloo":
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        values = [None] * self.size
        with spans.span("wait for all ranks"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def require_none(self, problems: Sequence[str]) -> None:
        """
        Raises:
            ValueError: any rank has a problem. Every rank raises it, with the same message.
        """
        _raise(self.gather(list(problems)))

    @contextmanager
    def on_errors(self) -> Iterator[None]:
        """If any rank raises ValueError or OSError inside the block, all ranks raise ValueError at its end. The block
        must not contain a collective."""
        problems = []
        try:
            yield
        except (ValueError, OSError) as error:
            problems.append(str(error))
        self.require_none(problems)

    def reduce(self, reports: Sequence[dict[str, Metric]], problems: Sequence[str] = ()) -> Metrics:
        """Reduce each metric over the micro-batches of all ranks to one number.

        Raises:
            ValueError: as `require_none` does for `problems`.
        """
        local: dict[str, tuple[str, float]] = {}
        names = [(name, metric) for report in reports for name, metric in report.items()]
        # All values come from the device in one transfer.
        values = torch.stack([metric.value.double() for _, metric in names]).tolist() if names else []
        for (name, metric), value in zip(names, values, strict=True):
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


def sum_over_data_ranks(x: Tensor) -> Tensor:
    """The elementwise sum over the data-parallel ranks, in place, on the rank's device. Collective: all of these ranks
    must call it."""
    dist.all_reduce(x, group=parallel_state.get_data_parallel_group())
    return x
