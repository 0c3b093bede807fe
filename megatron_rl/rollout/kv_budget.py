"""How many answers fit into an engine's KV cache, when nobody knows how long they will become.

If more answers run than the cache can hold, vLLM preempts some: it drops their keys and values and recomputes them
later. If each answer had a place for its largest length, most of the cache would stay empty. So this module looks ahead
with the lengths of recent answers. Their survival function is estimated by Kaplan and Meier (1958), which takes the
answers that still run into account: without them, the first answers to finish would make all answers look short. From
it follow mean and variance of the tokens that the running answers will hold at every later time, and a new answer fits
if the mean plus DEVIATIONS standard deviations never exceeds the capacity.

Invariants (tests/unit/rollout): answers that fit even with their largest lengths are never held back; one answer always
fits into an idle engine; for long-tailed lengths almost no answer is preempted, and far more answers run than with
places of the largest length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

BINS = 64
"""The number of bins of equal width for the lengths."""
RECENT = 2048
"""The number of recent answers that determine the survival function."""
DEVIATIONS = 3.0


class KvBudget:
    """
    Args:
        capacity: the number of tokens that the cache holds.
        longest: the largest number of sampled tokens of an answer.
        block: the number of tokens of a cache block; each answer may leave a part of its last one empty.
    """

    def __init__(self, capacity: int, longest: int, block: int) -> None:
        self._capacity, self._longest, self._block = capacity, longest, block
        self._width = -(-longest // BINS)
        self._bins: deque[int] = deque(maxlen=RECENT)
        """The classes of the lengths of recent answers."""

    def finished(self, num_sampled: int) -> None:
        """Note the length of an answer that has ended."""
        self._bins.append(min(num_sampled // self._width, BINS - 1))

    def forget(self) -> None:
        """Forget the lengths of recent answers."""
        self._bins.clear()

    def num_fitting(self, running: Sequence[tuple[int, int]], waiting: Sequence[int]) -> int:
        """How many of the waiting answers may start now, in their order.

        Args:
            running: for each running answer, the number of its tokens, prompt included, and the number of sampled ones.
            waiting: the number of tokens that each waiting answer starts with.
        """
        largest = sum(held - sampled for held, sampled in running) + sum(waiting)
        if largest + (len(running) + len(waiting)) * (self._longest + self._block) <= self._capacity:
            return len(waiting)
        held, sampled = np.array(running, int).reshape(-1, 2).T
        ages = np.minimum(sampled // self._width, BINS - 1)
        survival = self._survival(ages)
        mean, variance = np.zeros(BINS + 1), np.zeros(BINS + 1)
        for age in np.unique(ages):
            more = self._demand(held[ages == age], survival[age:])
            mean, variance = mean + more[0], variance + more[1]
        for count, size in enumerate(waiting):
            more = self._demand(np.array([size]), survival)
            mean, variance = mean + more[0], variance + more[1]
            if (mean + DEVIATIONS * np.sqrt(variance)).max() > self._capacity and (running or count):
                return count
        return len(waiting)

    def _survival(self, ages: np.ndarray) -> np.ndarray:
        """float64 [BINS + 1]: the share of answers that reach each class. One answer of uniformly distributed length is
        added to the observed ones.

        Args:
            ages: the classes that the running answers have reached.
        """
        ended = np.bincount(np.array(self._bins, int), minlength=BINS) + 1 / BINS
        still_running = np.bincount(ages, minlength=BINS)
        reached = np.cumsum((ended + still_running)[::-1])[::-1] - still_running
        share = np.cumprod(1 - ended / reached)
        return np.concatenate([[1.0], share[:-1], [0.0]])

    def _demand(self, held: np.ndarray, survival: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of the tokens that answers of one age will hold, 0 to BINS classes from now.

        Args:
            held: int64 [N], the tokens that they hold now.
            survival: from the class of their age on.
        """
        alive = np.zeros(BINS + 1)
        # An answer that ends within a class holds its tokens up to then.
        alive[: len(survival)] = np.concatenate([survival[:1], survival[:-1]]) / survival[0]
        tokens = held[:, None] + (self._block + self._width * np.arange(BINS + 1))
        return (alive * tokens).sum(0), (alive * (1 - alive) * tokens**2).sum(0)
