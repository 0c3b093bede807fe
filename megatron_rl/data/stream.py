"""An endless, shuffled stream of the items of a list, which can be resumed.

Invariants: every epoch has every item once. No item is dropped at the end of an epoch: the step is filled up from the
next epoch. The order depends only on the seed. A stream that was restored from a state continues exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class ShuffledStream(Generic[T]):
    """The prompts of a reinforcement-learning run, or the rows of a supervised run.

    Args:
        items: at least one item.
        items_per_step: the number of items that `next` returns. It may exceed the number of all items.
        seed: the order of epoch e is a function of (seed, e).
    """

    def __init__(self, items: Sequence[T], items_per_step: int, seed: int) -> None:
        if not items or items_per_step < 1:
            raise ValueError(f"a stream needs items, but there are {len(items)} items and {items_per_step} for a step")
        self._items, self._items_per_step, self._seed = items, items_per_step, seed
        self.epoch = 0
        self._cursor = 0
        self._order = self._shuffle()

    def next(self) -> list[T]:
        taken: list[T] = []
        while len(taken) < self._items_per_step:
            if self._cursor == len(self._items):
                self.epoch += 1
                self._cursor = 0
                self._order = self._shuffle()
            end = min(self._cursor + self._items_per_step - len(taken), len(self._items))
            taken += [self._items[i] for i in self._order[self._cursor : end]]
            self._cursor = end
        return taken

    def state(self) -> dict[str, int]:
        """The position in the stream as plain numbers, for a checkpoint."""
        position = {"epoch": self.epoch, "cursor": self._cursor}
        return position | {"seed": self._seed, "num_items": len(self._items)}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a `state`.

        Raises:
            ValueError: the state has another seed or another number of items, so the order would not be the same.
        """
        for name, value in (("seed", self._seed), ("num_items", len(self._items))):
            if state[name] != value:
                raise ValueError(
                    f"the checkpoint's data stream has {name} {state[name]}, this run has {value}; resume with the "
                    f"same seed and data, or start a new run"
                )
        self.epoch, self._cursor = state["epoch"], state["cursor"]
        self._order = self._shuffle()

    def _shuffle(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self.epoch]).permutation(len(self._items))
