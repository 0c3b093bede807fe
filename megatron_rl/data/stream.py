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
        self.position = 0
        """The number of the next item. Items are numbered through all epochs."""
        self._orders: dict[int, np.ndarray] = {}

    def next(self) -> list[T]:
        return [item for _, item in self.take(self._items_per_step)]

    def take(self, count: int) -> list[tuple[int, T]]:
        """The next items, with their numbers."""
        first, self.position = self.position, self.position + count
        return [(number, self.item(number)) for number in range(first, self.position)]

    def __len__(self) -> int:
        """The number of items in an epoch."""
        return len(self._items)

    def epoch(self, number: int) -> int:
        """The epoch in which an item of the stream comes."""
        return number // len(self._items)

    def item(self, number: int) -> T:
        epoch, place = divmod(number, len(self._items))
        return self._items[int(self._order(epoch)[place])]

    def state(self) -> dict[str, int]:
        """The position in the stream as plain numbers, for a checkpoint."""
        epoch, cursor = divmod(self.position, len(self._items))
        return {"epoch": epoch, "cursor": cursor, "seed": self._seed, "num_items": len(self._items)}

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
        self.position = state["epoch"] * len(self._items) + state["cursor"]

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            # The groups of an asynchronous run are of two epochs at most, unless an epoch is shorter than a batch.
            self._orders = {e: order for e, order in self._orders.items() if e >= epoch - 1}
            self._orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(len(self._items))
        return self._orders[epoch]
