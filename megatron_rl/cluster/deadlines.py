"""How long the driver waits for one part of a step.

A hang should cost minutes, but a step of a large model may take an hour. So each part's limit follows the run.
"""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

FACTOR = 5.0
"""A part may take this many times as long as it has taken so far at most."""
LEAST_S = 600.0
"""The smallest limit that follows the run, in seconds."""
FIRST_S = 7200.0
"""The limit, in seconds, of a part that has never ended."""


class Deadlines:
    """The time limits of the parts of a step, by what the processes are asked to do.

    Example: updates have taken 40, 90 and 300 s. The next one may take 1,500 s. If none had taken more than 90 s, it
    might take 600 s.
    """

    def __init__(self, fixed_s: float | None) -> None:
        """
        Args:
            fixed_s: `cluster.step_timeout_s`; None: the limits follow the run.
        """
        self._fixed_s = fixed_s
        self._longest_s: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    def limit_s(self, part: str) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        if part not in self._longest_s:
            return FIRST_S
        return max(LEAST_S, FACTOR * self._longest_s[part])

    def begin(self, part: str) -> None:
        """Measure from now on."""
        self._begun[part] = time.monotonic()

    def is_over(self, part: str) -> bool:
        """Whether a part has taken longer than its limit since `begin`."""
        return time.monotonic() - self._begun[part] > self.limit_s(part)

    def end(self, part: str) -> None:
        """Note that a part has ended, and begin to measure again."""
        self.took(part, time.monotonic() - self._begun[part])
        self.begin(part)

    def took(self, part: str, seconds: float) -> None:
        """Note that a part has ended after this time. The driver's log tells a part's first limit."""
        is_first = part not in self._longest_s
        self._longest_s[part] = max(seconds, self._longest_s.get(part, 0.0))
        if is_first and self._fixed_s is None:
            log.info("limit %s: %.0f s, because it took %.1f s", part, self.limit_s(part), seconds)

    def describe(self, part: str) -> str:
        """Says where the limit of a part comes from, and what to do if it is too short."""
        if self._fixed_s is not None:
            return "cluster.step_timeout_s is the limit; raise it if this part of a step may take longer"
        if part in self._longest_s:
            longest_s = self._longest_s[part]
            origin = f"it took {longest_s:.0f} s at most before, so the limit is {self.limit_s(part):.0f} s"
        else:
            origin = f"it has not ended before, so the limit is {FIRST_S:.0f} s"
        return f"{origin}; set cluster.step_timeout_s if it may take longer"
