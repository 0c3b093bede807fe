from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data import ItemSource, ShuffledStream


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 3))
def test_every_epoch_visits_every_item_once(num_items, per_step, seed):
    stream = ShuffledStream(list(range(num_items)), per_step, seed)
    steps = [stream.next() for _ in range(2 * num_items)]
    assert all(len(step) == per_step for step in steps)
    walk = [item for step in steps for item in step]
    epochs = [walk[i : i + num_items] for i in range(0, len(walk), num_items)]
    assert len(epochs) == 2 * per_step and all(sorted(epoch) == list(range(num_items)) for epoch in epochs)


def test_epochs_and_seeds_differ_and_repeat():
    items = list(range(100))
    epoch = lambda seed: ShuffledStream(items, 200, seed).next()  # noqa: E731
    assert epoch(0) == epoch(0) != epoch(1)
    assert epoch(0)[:100] != epoch(0)[100:]
    assert epoch(0)[100:] != epoch(1)[:100]


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=12), st.integers(0, 3))
def test_the_first_epochs_go_from_easy_to_hard(rates, num_epochs):
    n = len(rates)
    source = {"rows": ItemSource(range(n), pass_rates=np.array(rates))}
    stream, shuffled = ShuffledStream(source, n, 5, num_epochs), ShuffledStream(range(n), n, 5)
    for epoch in range(num_epochs + 2):
        given, plain = stream.next(), shuffled.next()
        if epoch < num_epochs:  # those with the same rate keep their random order
            assert given == sorted(plain, key=lambda item: -rates[item])
        else:
            assert given == plain


def test_rows_keep_their_order_if_they_are_not_shuffled():
    stream = ShuffledStream("abcde", 4, seed=4, shuffle=False)
    assert "".join(stream.next() + stream.next() + stream.next()) == "abcdeabcdeab"


@given(st.integers(0, 20), st.integers(1, 7))
def test_a_restored_stream_continues_exactly(num_steps, per_step):
    stream = ShuffledStream("abcde", per_step, seed=4)
    for _ in range(num_steps):
        stream.next()
    resumed = ShuffledStream("abcde", per_step, seed=4)
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert [resumed.next() for _ in range(9)] == [stream.next() for _ in range(9)]


def test_a_state_of_another_run_is_refused():
    state = ShuffledStream("abc", 2, seed=0).state()
    with pytest.raises(ValueError, match="seed 0, this run has 1"):
        ShuffledStream("abc", 2, seed=1).restore(state)
    with pytest.raises(ValueError, match="3 rows.*has 4"):
        ShuffledStream("abcd", 2, seed=0).restore(state)


@pytest.mark.parametrize(("items", "per_step"), [("", 1), ("a", 0)])
def test_nothing_to_stream(items, per_step):
    with pytest.raises(ValueError, match="a stream needs items"):
        ShuffledStream(items, per_step, seed=0)
