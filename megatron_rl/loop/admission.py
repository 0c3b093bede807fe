"""The decisions of an asynchronous run: which groups it asks for, and which ones a step trains on.

A group is known by its number, which is the place of its prompt in the stream of prompts. It is *running* from its
admission until it is generated and verified, then it is *ready*, and at last a step takes it. Its lag in step s is s
minus the version of the weights at its admission, so it is at least the lag of each of its tokens.

The bound on the lag is kept by admission, and not by throwing answers away: running and ready groups together never
exceed max_lag + 1 batches, where a running group counts by the recent share of useful groups; and a step does not take
groups out of turn if the older ones could then not be trained on in time. AReaL (arXiv:2505.24298) bounds the number of
admitted groups in the same way. By choice, a step does not wait for such older groups but gives them up.

Invariants (tests/unit/loop), for any order of finishing groups: a batch has always the same size; no group is taken
twice; no group is taken with a lag above max_lag; every group is taken, or counted as useless, surplus or late; a step
that waits always waits for a group that is running.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from math import ceil

LEAST_SHARE = 1 / 32
"""The recent share of useful groups counts as at least this much, which bounds the number of running groups."""
WINDOW = 4
"""The recent share of useful groups covers about the last four batches."""


class Admission:
    """
    Args:
        batch: the number of groups in a training step.
        max_lag: the largest lag of a group, in steps.
        waits: whether a step waits for the running groups that no later step could take in time. Otherwise it gives
            them up, once it has a full batch.
    """

    def __init__(self, batch: int, max_lag: int, waits: bool = True) -> None:
        self._batch, self._max_lag, self._waits = batch, max_lag, waits
        self.running: dict[int, int] = {}
        """The version at its admission of every running group, by the group's number."""
        self.ready: dict[int, int] = {}
        """The same for the groups that wait for a step."""
        self.late: list[int] = []
        """The groups that were given up while they ran, since somebody emptied the list."""
        self.share = 1.0
        """The recent share of useful groups among the finished ones."""
        self.num_useless = 0
        """The number of groups that finished without being useful, since somebody set it to 0."""
        self.num_surplus = 0
        """The same for useful groups that were dropped: more groups were useful than expected, and no step could take
        these within the bound."""

    @property
    def useless_batches(self) -> float:
        return self.num_useless / self._batch

    def room(self, num_steps: int) -> int:
        """The number of groups to admit now. If only some groups are useful, more of them run, so that the expected
        number of useful ones stays within the bound.

        Args:
            num_steps: the number of steps that have not taken their groups yet.
        """
        free = min(self._max_lag + 1, num_steps) * self._batch - len(self.ready)
        return max(0, ceil(free / self.share) - len(self.running))

    def admit(self, number: int, version: int) -> None:
        """Note that a group was asked for while the engines held `version`."""
        assert number not in self.running and number not in self.ready, f"group {number} was admitted twice"
        self.running[number] = version

    def finish(self, number: int, useful: bool) -> bool:
        """Note that a group is generated and verified. Returns whether it waits for a step now."""
        version = self.running.pop(number)
        self.share = max(LEAST_SHARE, self.share + (useful - self.share) / (WINDOW * self._batch))
        if useful:
            self.ready[number] = version
        else:
            self.num_useless += 1
        return useful

    def put_back(self, number: int, version: int) -> None:
        """Make a group ready again that a step has taken."""
        self.ready[number] = version

    def take(self, step: int) -> list[int] | None:
        """The numbers of the groups that a step trains on, the oldest first; None if the step must wait until more
        groups are ready."""
        if len(self.ready) < self._batch:
            return None
        order = sorted(self.ready, key=lambda number: (self.ready[number], number))
        taken, left = order[: self._batch], order[self._batch :]
        versions_left = [self.ready[number] for number in left]
        num_running = Counter(self.running.values())
        num_older = 0
        surplus: set[int] = set()
        for version in sorted({*self.ready.values(), *num_running}):
            # The steps up to version + max_lag are the only ones that can take the groups of this version and older.
            capacity = (version + self._max_lag - step) * self._batch
            waiting = [number for number in left[: bisect_right(versions_left, version)] if number not in surplus]
            num_older += num_running[version]
            excess = len(waiting) + num_older * self.share - capacity
            if num_older and excess > 0:
                if self._waits:
                    return None
                num_older -= self._give_up(version, ceil(excess / self.share))
            surplus.update(waiting[max(0, capacity) :])
        for number in (*taken, *surplus):
            del self.ready[number]
        self.num_surplus += len(surplus)
        return taken

    def _give_up(self, version: int, count: int) -> int:
        """Give up running groups of this version and older ones, at most `count`. Returns their number."""
        late = sorted(number for number, admitted in self.running.items() if admitted <= version)[:count]
        for number in late:
            del self.running[number]
        self.late += late
        return len(late)
