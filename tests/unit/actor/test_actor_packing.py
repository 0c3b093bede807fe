from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shares import TrainSample, share_of

from megatron_rl.actor.packing import Microbatch, pack
from megatron_rl.types import Tokens


def sample(name: str, ids, mask, advantage: float = 0.0) -> TrainSample:
    ids, mask = np.array(ids, np.int32), np.array(mask, bool)
    logp = np.where(mask, -ids / 10, 0).astype(np.float32)
    return TrainSample(name, Tokens(ids, mask, logp, np.where(mask, 3, -1)), advantage, 0.5, index=7)


def pack_row(samples: list[TrainSample], alignment: int) -> Microbatch:
    [[batch]] = pack(share_of([[samples]], alignment=alignment, version=5))
    return batch


def test_columns_belong_to_the_next_token():
    batch = pack_row([sample("a", [5, 6, 7], [0, 1, 1], 2.0), sample("b", [8, 9], [0, 1], -1.0)], alignment=2)
    assert batch.lengths_S.tolist() == [4, 2]
    assert batch.ids_T.tolist() == [5, 6, 7, 0, 8, 9]
    assert batch.target_T.tolist() == [6, 7, 0, 0, 9, 0]
    assert batch.padding_T.tolist() == [False, False, False, True, False, False]
    columns = batch.columns
    assert columns.action_mask_T.tolist() == [True, True, False, False, True, False]
    assert columns.logp_rollout_T.tolist() == pytest.approx([-0.6, -0.7, 0, 0, -0.9, 0])
    assert columns.advantage_T.tolist() == [2, 2, 2, 2, -1, -1]
    assert columns.sample_T.tolist() == [0, 0, 0, 0, 1, 1]
    assert columns.weight_T.tolist() == [0.5] * 6
    assert columns.lag_T.tolist() == [2, 2, 0, 0, 2, 0]
    assert (columns.token_T - (7 << 32)).tolist() == [1, 2, 3, 4, 1, 2]


def test_an_empty_microbatch_is_one_dummy_without_actions():
    batch = pack_row([], alignment=4)
    assert batch.names == () and batch.lengths_S.tolist() == [4]
    assert not batch.columns.action_mask_T.any() and batch.padding_T.all()


def test_arrays_of_different_lengths_are_refused_by_name():
    broken = sample("prompt3#1", [1, 2, 3], [0, 1, 1])
    broken = replace(broken, tokens=replace(broken.tokens, ids=broken.tokens.ids[:2]))
    with pytest.raises(ValueError, match="prompt3#1.* 2, 3, 3, 3 entries"):
        pack_row([broken], 1)


def with_routes(one: TrainSample, routes) -> TrainSample:
    return replace(one, tokens=replace(one.tokens, routes=np.array(routes, np.uint8)))


def test_routes_belong_to_the_tokens_themselves():
    """Two layers with one expert each; the engine told nothing of the second sample, and nothing of the last tokens."""
    first = with_routes(sample("a", [5, 6, 7], [0, 1, 1]), [[[1], [2]], [[3], [4]]])
    last = with_routes(sample("c", [4, 3], [0, 1]), [[[255], [6]]])
    batch = pack_row([first, sample("b", [8, 9], [0, 1]), last], alignment=4)
    known = batch.routes.is_known_T
    assert known.tolist() == [True, True, False, False] + [False] * 4 + [True, False, False, False]
    assert batch.routes.expert_TLK[known].tolist() == [[[1], [2]], [[3], [4]], [[255], [6]]]
    assert pack_row([sample("b", [8, 9], [0, 1])], 1).routes is None


def test_more_routes_than_tokens_are_refused_by_name():
    with pytest.raises(ValueError, match="sample a: routes has 2 entries, but there are 1 tokens"):
        pack_row([with_routes(sample("a", [5], [0]), [[[1]], [[2]]])], 1)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_packing_changes_no_sample(lengths, alignment, random):
    samples = [
        sample(str(i), [random.randrange(50) for _ in range(n)], [random.random() < 0.5 for _ in range(n)], i)
        for i, n in enumerate(lengths)
    ]
    together = pack_row(samples, alignment)
    start = 0
    for i, one in enumerate(samples):
        alone = pack_row([one], alignment)
        here = slice(start, start + int(alone.lengths_S[0]))
        for column in ("ids_T", "target_T"):
            assert getattr(together, column)[here].tolist() == getattr(alone, column).tolist(), column
        for column in ("action_mask_T", "token_T", "weight_T", "advantage_T", "logp_rollout_T", "lag_T"):
            assert getattr(together.columns, column)[here].tolist() == getattr(alone.columns, column).tolist(), column
        assert set(together.columns.sample_T[here].tolist()) == {i}
        # every action is in the loss exactly once, except one at position 0, which no position predicts
        assert int(alone.columns.action_mask_T.sum()) == int(one.tokens.action_mask[1:].sum())
        start = here.stop
    assert start == len(together.ids_T)
