from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data import ItemSource, ShuffledStream
from megatron_rl.data.mixture import MAX_TURNS, turns_of, whole_shares
from megatron_rl.data.stream import RowsDigest

SHARES = st.lists(st.integers(1, 20), min_size=1, max_size=7)


def stream(sizes: dict[str, tuple[int, int]], seed: int = 0, **digests: str) -> ShuffledStream[tuple[str, int]]:
    """A mixture of sources with (number of items, share)."""
    sources = {
        name: ItemSource([(name, i) for i in range(size)], digests.get(name, ""), share)
        for name, (size, share) in sizes.items()
    }
    return ShuffledStream(sources, 4, seed)


def test_shares_in_lowest_terms():
    assert whole_shares({"a": 0.7, "b": 0.2, "c": 0.1}) == {"a": 7, "b": 2, "c": 1}
    assert whole_shares({"a": 3, "b": 1.5}) == {"a": 2, "b": 1}
    assert whole_shares({"a": 1e-05, "b": 1}) == {"a": 1, "b": 100_000}
    assert whole_shares({"a": 700_000, "b": 300_000}) == {"a": 7, "b": 3}
    assert whole_shares({"a": 5}) == {"a": 1}


@pytest.mark.parametrize("share", [0, -1, 0.0, float("nan"), float("inf")])
def test_a_source_that_would_be_empty(share):
    with pytest.raises(ValueError, match=f"the source code has the share {share}, so it would be empty"):
        whole_shares({"mathematics": 1, "code": share})


def test_an_order_that_would_not_repeat_soon():
    assert sum(whole_shares({"a": 1, "b": MAX_TURNS - 1}).values()) == MAX_TURNS
    with pytest.raises(ValueError, match="after 1,000,001"):
        whole_shares({"a": 1, "b": MAX_TURNS})


def test_turns_by_hand():
    """Deadlines of 3 of 4: 2, 3, 4; of 1 of 4: 4. Releases of 3 of 4: 0, 1, 2."""
    order, before = turns_of([3, 1])
    assert (order.tolist(), before.tolist()) == ([0, 0, 0, 1], [0, 1, 2, 0])
    order, before = turns_of([2, 2, 1])
    assert (order.tolist(), before.tolist()) == ([0, 1, 0, 1, 2], [0, 0, 1, 1, 0])


@given(SHARES)
def test_every_beginning_has_each_source_in_its_share_with_less_than_one_item_more_or_less(shares):
    order, before = turns_of(shares)
    counts = [0] * len(shares)
    for turn, (source, k) in enumerate(zip(order.tolist(), before.tolist(), strict=True), start=1):
        assert k == counts[source]
        counts[source] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count * len(order) - turn * share) < len(order)
    assert counts == shares


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4), st.integers(0, 3))
def test_every_epoch_of_a_source_has_each_of_its_items_once(sizes, seed):
    named = {f"s{i}": size for i, size in enumerate(sizes)}
    mixed = stream(named, seed)
    walk = mixed.take(40)
    assert len(mixed) == sum(size for size, _ in sizes)
    for name, (size, _) in named.items():
        own = [(number, item) for number, (source, item) in walk if source == name]
        epochs = [own[i : i + size] for i in range(0, len(own), size)]
        for epoch, items in enumerate(epochs):
            assert [mixed.epoch(number) for number, _ in items] == [epoch] * len(items)
            seen = [item for _, item in items]
            assert len(set(seen)) == len(seen)
            assert len(seen) == size or epoch == len(epochs) - 1


def test_a_stream_without_sources_keeps_its_order():
    expected = [5, 6, 2, 1, 4, 3, 0, 2, 1, 4, 0, 5, 6, 3]
    assert ShuffledStream(list(range(7)), 14, seed=3).next() == expected
    assert ShuffledStream({"a": ItemSource(list(range(7)))}, 14, seed=3).next() == expected


def test_sources_of_one_size_have_different_orders():
    walk = stream({"a": (50, 1), "b": (50, 1)}).take(100)
    orders = [[item for _, (source, item) in walk if source == name] for name in "ab"]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50)) and orders[0] != orders[1]


@given(st.integers(0, 60), st.integers(0, 3))
def test_a_restored_mixture_continues_exactly(position, seed):
    sizes = {"a": (5, 3), "b": (2, 2), "c": (9, 1)}
    first = stream(sizes, seed)
    first.take(position)
    resumed = stream(sizes, seed)
    resumed.restore(json.loads(json.dumps(first.state(), sort_keys=True)))
    assert resumed.take(40) == first.take(40)


def test_any_item_can_be_asked_for_again():
    mixed = stream({"a": (3, 5), "b": (4, 1)})
    walk = mixed.take(50)
    assert [(number, mixed.item(number)) for number, _ in reversed(walk)] == walk[::-1]
    assert Counter(source for _, (source, _) in walk[:48]) == {"a": 40, "b": 8}


@pytest.mark.parametrize(
    ("changed", "digests", "message"),
    [
        ({"a": (3, 1), "b": (5, 2)}, {}, "4 rows in the source b, this run has 5"),
        ({"a": (3, 2), "b": (4, 2)}, {}, "share 1 in the source a, this run has 2"),
        (
            {"a": (3, 1), "b": (4, 2)},
            {"b": "other"},
            "other rows in the source b: of the 4 rows, names, tokens or pass rates have",
        ),
        ({"a": (3, 1)}, {}, r"the sources \['a', 'b'\], this run has \['a'\]"),
        ({"b": (4, 2), "a": (3, 1)}, {}, r"the sources \['a', 'b'\], this run has \['b', 'a'\]"),
    ],
)
def test_a_source_that_has_changed_is_named(changed, digests, message):
    state = stream({"a": (3, 1), "b": (4, 2)}).state()
    with pytest.raises(ValueError, match=message + ".*resume with the same seed and data"):
        stream(changed, **digests).restore(state)


def test_the_state_of_an_earlier_version_is_refused():
    with pytest.raises(ValueError, match="that of an earlier version; start a new run"):
        stream({"a": (3, 1)}).restore({"epoch": 0, "cursor": 2, "seed": 0, "num_items": 3})


def test_a_source_without_rows():
    with pytest.raises(ValueError, match="none in the source b"):
        stream({"a": (3, 1), "b": (0, 1)})


def test_the_digest_of_rows_depends_on_names_tokens_and_their_order():
    def digest(*rows: tuple[str, list[int]]) -> str:
        found = RowsDigest()
        for uid, ids in rows:
            found.add(uid, ids)
        return str(found)

    rows = [("a:1", [1, 2]), ("a:2", [3])]
    assert digest(*rows) == digest(*rows)
    others = [rows[::-1], [("a:1", [1]), ("a:2", [2, 3])], [("a:1", [1, 2]), ("a:3", [3])], rows[:1]]
    assert len({digest(*rows), *(digest(*other) for other in others)}) == 5
