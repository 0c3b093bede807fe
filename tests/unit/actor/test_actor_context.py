"""Which tokens each context-parallel rank has, and which queries it compares with which keys in each turn."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.actor.context import ContextRank, plan_ring, positions
from megatron_rl.config.policy import ParallelConfig

SIZES = st.integers(2, 4)
CHUNKS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def test_a_rank_has_an_early_and_a_late_chunk_of_each_sequence():
    lengths = torch.tensor([8, 4])
    assert positions(lengths, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert positions(lengths, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


@given(SIZES, CHUNKS)
def test_the_parts_of_all_ranks_are_the_row(size, chunks):
    lengths = 2 * size * torch.tensor(chunks)
    parts = [positions(lengths, size, rank) for rank in range(size)]
    assert torch.cat(parts).sort().values.tolist() == list(range(int(lengths.sum())))
    assert len({len(part) for part in parts}) == 1


@given(SIZES, CHUNKS, st.none() | st.integers(1, 30))
def test_every_query_meets_each_key_that_it_sees_once(size, chunks, window):
    lengths = 2 * size * torch.tensor(chunks)
    sequence = torch.arange(len(chunks)).repeat_interleave(lengths)
    met: Counter[tuple[int, int]] = Counter()
    for rank in range(size):
        context = ContextRank(None, rank, size)
        mine = context.part(lengths)
        for turn, pairs in enumerate(plan_ring(lengths, context, window).turns):
            theirs = positions(lengths, size, (rank - turn) % size)
            for pair in pairs:
                for queries, keys in zip(mine[pair.query_BL].tolist(), theirs[pair.key_BK].tolist(), strict=True):
                    for i, query in enumerate(queries):
                        for j, key in enumerate(keys):
                            sees = i >= j if pair.is_causal else pair.mask_LK is None or bool(pair.mask_LK[i, j])
                            met[query, key] += sees
    expected = {
        (query, key)
        for query in range(len(sequence))
        for key in range(query + 1)
        if sequence[query] == sequence[key] and (window is None or query - key < window)
    }
    assert {pair for pair, count in met.items() if count} == expected and max(met.values()) == 1


@given(SIZES, st.integers(1, 40))
def test_without_a_window_all_ranks_have_equal_work(size, chunk):
    lengths = torch.tensor([2 * size * chunk])
    work = set()
    for rank in range(size):
        pairs = [pair for turn in plan_ring(lengths, ContextRank(None, rank, size)).turns for pair in turn]
        work.add(sum(p.query_BL.numel() * p.key_BK.numel() // (2 if p.is_causal else 1) for p in pairs))
    assert len(work) == 1


def test_sequences_are_padded_so_that_every_split_is_even():
    def alignment(**sizes) -> int:
        return ParallelConfig(**sizes).alignment

    assert [alignment(), alignment(tensor=4), alignment(tensor=4, sequence=False)] == [1, 4, 1]
    assert [alignment(context=4), alignment(context=4, tensor=2), alignment(context=2, tensor=3)] == [8, 8, 12]
