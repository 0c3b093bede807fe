"""What every actor of a run can do for a trace. It is apart from tracing.py, which the driver alone imports."""

from __future__ import annotations

import time

from megatron_rl import spans
from megatron_rl.spans import TimeSpan


class TracedProcess:
    place = ""
    """What a trace says of the process's part, such as its pipeline stage."""

    def trace(self, on: bool) -> tuple[str, list[TimeSpan]]:
        """`place`, and what `spans.keep` returns."""
        return self.place, spans.keep(on)

    def clock(self) -> int:
        """The time of spans now."""
        return time.perf_counter_ns()
