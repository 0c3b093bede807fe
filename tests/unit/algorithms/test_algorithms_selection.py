from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_batch import Meeting

from megatron_rl.algorithms.selection import choose_largest, choose_random, hash_key, ordered_key

FLOATS = st.floats(width=32, allow_nan=False)


def alone(x):
    return x


def everywhere(x):
    return torch.ones(len(x), dtype=torch.bool)


@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(1, 45), st.integers(1, 5))
def test_chooses_what_sorting_chooses(values, count, parts):
    chunks = [torch.tensor(values[m::parts], dtype=torch.float32) for m in range(parts)]
    chosen = choose_largest(chunks, [everywhere(c) for c in chunks], count, alone)
    kth = sorted(values)[-min(count, len(values))]
    for chunk, picked in zip(chunks, chosen, strict=True):
        assert picked.tolist() == [x >= kth for x in chunk.tolist()]


@given(st.lists(FLOATS, min_size=2, max_size=20))
def test_keys_are_in_the_order_of_the_values(values):
    keys = ordered_key(torch.tensor(values, dtype=torch.float32)).tolist()
    assert all(0 <= key < 2**32 for key in keys)
    for a, key_a in zip(values, keys, strict=True):
        for b, key_b in zip(values, keys, strict=True):
            assert (a < b) == (key_a < key_b)


def test_the_mask_is_respected_and_an_empty_part_is_welcome():
    values = [torch.tensor([9.0, 1.0, 5.0]), torch.tensor([]), torch.tensor([7.0, float("nan")])]
    masks = [torch.tensor([False, True, True]), torch.tensor([], dtype=torch.bool), torch.tensor([True, True])]
    assert [x.tolist() for x in choose_largest(values, masks, 2, alone)] == [[False, False, True], [], [True, False]]


def test_ranks_agree_on_the_threshold():
    values = torch.randn(999, generator=torch.Generator().manual_seed(0))
    expected = values >= values.sort(descending=True).values[99]
    meeting, chosen = Meeting(3), [None] * 3

    def run(rank):
        mine = [values[rank::3]]
        chosen[rank] = choose_largest(mine, [everywhere(mine[0])], 100, meeting.sum_of(rank))[0]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for rank in range(3):
        assert torch.equal(chosen[rank], expected[rank::3])


def test_random_choice_is_spread_evenly_and_repeats():
    tokens = torch.arange(20_000) + (7 << 32)
    (chosen,) = choose_random([tokens], [everywhere(tokens)], 2_000, alone)
    assert int(chosen.sum()) == 2_000
    assert torch.equal(chosen, choose_random([tokens], [everywhere(tokens)], 2_000, alone)[0])
    # Ten bins of expectation 200, standard deviation 13: five of them.
    assert np.abs(chosen.view(10, -1).sum(1).numpy() - 200).max() < 65


def test_hash_keys_equal_splitmix64():
    def splitmix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return (x ^ (x >> 31)) >> 32

    names = [0, 1, 12345, 2**40 + 17, 2**62]
    assert hash_key(torch.tensor(names)).tolist() == [splitmix(x) for x in names]


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_candidates_than_wanted_are_all_chosen(count):
    (chosen,) = choose_largest([torch.tensor([-5.0, 2.0])], [torch.tensor([True, False])], count, alone)
    assert chosen.tolist() == [True, False]
