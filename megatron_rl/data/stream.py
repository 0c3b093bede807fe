"""An endless, shuffled stream of the items of one or more sources, which can be resumed.

Invariants (tests/unit/data): every epoch of a source has each of its items once; the first epochs may be ordered by
falling pass rate. No item is dropped at the end of an epoch: the step is filled up from the next epoch. Every beginning
of the stream has its sources in their shares, with less than one item more or less (`mixture.py`). The order depends
only on the seed, the numbers of items and the shares. A stream that was restored from a state continues exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from megatron_rl.data.mixture import turns_of
from megatron_rl.data.rows import counted
from megatron_rl.types import Picture

T = TypeVar("T")
ALL = "all"
"""The name of the source of a stream that has no others."""


@dataclass(frozen=True, slots=True)
class ItemSource(Generic[T]):
    """The items of one source. They may be made when they are asked for."""

    items: Sequence[T]
    digest: str = ""
    """The digest of the items' contents, by which a resumed run knows them."""
    share: int = 1
    """The number of items from this source among as many consecutive items of the stream as the sum of all shares."""
    pass_rates: np.ndarray | None = None
    """The share of right answers to each item, [number of items]. Epochs that begin with easy items need it."""


class RowsDigest:
    """The digest of rows, by their names, tokens and images, and by their pass rates if these decide the order."""

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=16)

    def add(
        self, uid: str, ids: Iterable[int], pass_rate: float | None = None, pictures: Iterable[Picture] = ()
    ) -> None:
        name, tokens = uid.encode(errors="surrogateescape"), np.array(ids, np.int32).tobytes()
        self._state.update(b"%d %d " % (len(name), len(tokens)) + name + tokens)
        for picture in pictures:
            self._state.update(picture.digest.encode())
        if pass_rate is not None:
            self._state.update(repr(float(pass_rate)).encode())

    def __str__(self) -> str:
        return self._state.hexdigest()


class ShuffledStream(Generic[T]):
    """The prompts of a reinforcement-learning run, or the rows of a supervised run.

    Args:
        items: the items; or the sources of a mixture by their names, in an order that counts. Each source has at least
            one item.
        items_per_step: the number of items that `next` returns. It may exceed the number of all items.
        seed: the order of a source's epoch e is a function of the seed, e, and the place of the source.
        easy_first_epochs: the number of first epochs of each source that order its items by falling pass rate.
        shuffle: whether the other epochs are shuffled.
    """

    def __init__(
        self,
        items: Sequence[T] | Mapping[str, ItemSource[T]],
        items_per_step: int,
        seed: int,
        easy_first_epochs: int = 0,
        shuffle: bool = True,
    ) -> None:
        given = items if isinstance(items, Mapping) else {ALL: ItemSource(items)}
        empty = [name for name, source in given.items() if not source.items]
        if not given or empty or items_per_step < 1:
            raise ValueError(
                f"a stream needs items, but there are {items_per_step} for a step"
                + "".join(f", and none in the source {name}" for name in empty)
            )
        self._names, self._sources = list(given), list(given.values())
        self._items_per_step, self._seed, self._easy_first_epochs = items_per_step, seed, easy_first_epochs
        self._shuffle = shuffle
        self._turns, self._before = turns_of([source.share for source in self._sources])
        self.position = 0
        """The number of the next item. Items are numbered through the whole stream."""
        self._orders: list[dict[int, np.ndarray]] = [{} for _ in self._sources]

    def next(self) -> list[T]:
        return [item for _, item in self.take(self._items_per_step)]

    def take(self, count: int) -> list[tuple[int, T]]:
        """The next items, with their numbers."""
        first, self.position = self.position, self.position + count
        return [(number, self.item(number)) for number in range(first, self.position)]

    def __len__(self) -> int:
        """The number of items of all sources."""
        return sum(len(source.items) for source in self._sources)

    def epoch(self, number: int) -> int:
        """The epoch of its source when an item of the stream comes."""
        return self._place(number)[1]

    def item(self, number: int) -> T:
        index, epoch, place = self._place(number)
        return self._sources[index].items[int(self._order(index, epoch)[place])]

    def state(self) -> dict[str, Any]:
        """The position in the stream, and what the order depends on, in JSON's types."""
        sources = [
            {"name": name, "num_items": len(source.items), "digest": source.digest, "share": source.share}
            for name, source in zip(self._names, self._sources, strict=True)
        ]
        return {"position": self.position, "seed": self._seed, "sources": sources}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`.

        Raises:
            ValueError: the state has another seed or other sources, so that the stream would not be the same. The
                message says which source has changed.
        """
        mine = self.state()
        if "sources" not in state:
            raise ValueError(
                "the checkpoint's data stream is that of an earlier version; start a new run from its export"
            )
        changes = [f"seed {state['seed']}, this run has {self._seed}"] if state["seed"] != self._seed else []
        names = [source["name"] for source in state["sources"]]
        if names != self._names:
            changes.append(f"the sources {names}, this run has {self._names}")
        else:
            for before, now in zip(state["sources"], mine["sources"], strict=True):
                changes += _changes(before, now)
        if changes:
            raise ValueError(
                f"the checkpoint's data stream has {'; '.join(changes)}; resume with the same seed and data, or start "
                f"a new run"
            )
        self.position = state["position"]

    def _place(self, number: int) -> tuple[int, int, int]:
        """The index of an item's source, the epoch of this source, and the place in this epoch."""
        period, turn = divmod(number, len(self._turns))
        index = int(self._turns[turn])
        source = self._sources[index]
        return index, *divmod(period * source.share + int(self._before[turn]), len(source.items))

    def _order(self, index: int, epoch: int) -> np.ndarray:
        orders = self._orders[index]
        if epoch not in orders:
            # The groups of an asynchronous run are of two epochs at most, unless an epoch is shorter than a batch.
            for old in [e for e in orders if e < epoch - 1]:
                del orders[old]
            # The first source has the order that it would have alone.
            seed = [self._seed, epoch, index] if index else [self._seed, epoch]
            source = self._sources[index]
            size = len(source.items)
            orders[epoch] = np.random.default_rng(seed).permutation(size) if self._shuffle else np.arange(size)
            if epoch < self._easy_first_epochs:
                assert source.pass_rates is not None
                orders[epoch] = orders[epoch][np.argsort(-source.pass_rates[orders[epoch]], kind="stable")]
        return orders[epoch]


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How a source has changed; nothing if it has not."""
    source = f"in the source {now['name']}"
    if before["num_items"] != now["num_items"]:
        return [f"{counted(before['num_items'], 'row')} {source}, this run has {now['num_items']:,}"]
    if before["share"] != now["share"]:
        return [f"share {before['share']} {source}, this run has {now['share']}"]
    if before["digest"] != now["digest"]:
        return [
            f"other rows {source}: of the {counted(now['num_items'], 'row')}, names, tokens or pass rates have "
            "changed (also a tokenizer or a chat template can do this, such as one that writes the date)"
        ]
    return []
