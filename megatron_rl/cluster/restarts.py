"""How many lost processes a run survives, and how long it waits before it restarts one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from megatron_rl.cluster import waiting
from megatron_rl.ports import TooManyRestarts

log = logging.getLogger(__name__)

HOUR_S = 3600.0
LONGEST_PAUSE_S = 60.0


class Restarts:
    """The restarts of a run, of all of its processes together.

    The first restart of an hour begins at once, and the following ones after 1, 2, 4, ... seconds, so that a fault that
    lasts for some seconds does not use up the budget. An error that comes again before anything was done will come each
    time, and ends the run.
    """

    def __init__(self, per_hour: int) -> None:
        self._per_hour = per_hour
        self._lock = threading.Lock()
        """Verifiers spend in their own threads."""
        self._recent: deque[tuple[float, str]] = deque()
        """The times, by time.monotonic, and the causes of the restarts in the last hour."""
        self._lasting = ""
        """The error of the last restart, if it was one that may come again and nothing was done since."""

    def progressed(self) -> None:
        """Note that something was done since the last restart."""
        self._lasting = ""

    def spend(self, cause: str, lasts: bool = False) -> None:
        """Count a restart, and wait before it.

        Args:
            lasts: whether it is an error of a program, which may come each time, and not a death.

        Raises:
            TooManyRestarts: it is one more than the run allows in an hour, and the message has the causes of all of
                them; or the same error came again before anything was done.
        """
        if lasts and cause == self._lasting:
            raise TooManyRestarts(f"{cause}\nThe run ends because the same error came again before anything was done.")
        self._lasting = cause if lasts else ""
        now = time.monotonic()
        with self._lock:
            while self._recent and self._recent[0][0] < now - HOUR_S:
                self._recent.popleft()
            before = len(self._recent)
            if before >= self._per_hour:
                raise TooManyRestarts(cause + self._history(now))
            self._recent.append((now, cause))
        log.warning("restart %d within an hour, of at most %d: %s", before + 1, self._per_hour, cause)
        if before:
            waiting.pause(min(2.0 ** (before - 1), LONGEST_PAUSE_S))

    def take_back(self, cause: str) -> None:
        """Forget a restart that turned out to have a cause which will not pass."""
        with self._lock:
            kept = [one for one in self._recent if one[1] != cause]
            self._recent = deque(kept)

    def _history(self, now: float) -> str:
        if not self._recent:
            return ""
        lines = [f"  {now - then:.0f} s ago: {cause.splitlines()[0]}" for then, cause in self._recent]
        return (
            f"\nThe run ends because it had {len(lines)} restarts within an hour, as many as cluster.restarts_per_hour "
            "allows:\n" + "\n".join(lines)
        )
