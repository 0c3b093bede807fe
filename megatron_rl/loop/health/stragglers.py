"""Names a trainer rank that is slower than the others, because all of them wait for it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.ports import Sink
from megatron_rl.types import Metrics

RATIO = 1.5
"""A rank is slow if it takes this many times as long as the median rank."""
NUM_STEPS = 5
"""The number of consecutive slow steps before a rank is named, because a single step may be slow by chance."""


class Stragglers:
    def __init__(self) -> None:
        self._rank: float | None = None
        self._num_steps = 0

    def count(self, updates: Sequence[Metrics], sink: Sink) -> None:
        """Count a step, and warn.

        Args:
            updates: the metrics of the step's updates. The last one counts. The number of the rank is removed
                from them, because a mean of such numbers says nothing.
        """
        ratio = updates[-1].get("slowest_rank/ratio", 1.0)
        [*_, rank] = [update.pop("slowest_rank/number", None) for update in updates]
        if rank is None or ratio < RATIO:
            self._rank = None
            return
        self._num_steps = self._num_steps + 1 if rank == self._rank else 1
        self._rank = rank
        if self._num_steps == NUM_STEPS:
            sink.warn(
                f"trainer rank {rank:.0f} is slow: the same matrix product takes it {ratio:.1f} times as long as the "
                f"median rank, in {NUM_STEPS} steps in a row. All ranks wait for it; look at the clock, temperature "
                f"and memory errors of its GPU, and at what else runs on its node (its log names the node)",
                "slow_rank",
            )
