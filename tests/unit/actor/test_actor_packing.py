from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shares import TrainSample, share_of

from megatron_rl.actor.packing import (
    SHORTEST_SHARED,
    Microbatch,
    by_sample,
    column_of,
    multiplicity,
    pack,
    targets_after_next,
)
from megatron_rl.types import Tokens


def sample(name: str, ids, mask, advantage: float = 0.0) -> TrainSample:
    ids, mask = np.array(ids, np.int32), np.array(mask, bool)
    logp = np.where(mask, -ids / 10, 0).astype(np.float32)
    return TrainSample(name, Tokens(ids, mask, logp, np.where(mask, 3, -1)), advantage, 0.5, index=7)


def pack_row(samples: list[TrainSample], alignment: int, share_prompts: bool = False) -> Microbatch:
    [[batch]] = pack(share_of([[samples]], alignment=alignment, version=5), share_prompts)
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


def test_a_head_predicts_actions_after_actions_of_the_same_sample():
    """The first action, what follows a hole, and the next sample's first token are no targets."""
    whole = sample("a", [5, 6, 31, 1, 7, 8, 9], [0, 0, 1, 1, 0, 1, 1])
    batch = pack_row([whole, sample("b", [1, 2], [0, 1]), sample("c", [3, 4, 5], [0, 1, 1])], alignment=1)
    after_T, is_target_T = targets_after_next(batch)
    found = [(int(batch.ids_T[i]), int(batch.target_T[i]), int(after_T[i])) for i in is_target_T.nonzero()]
    assert found == [(6, 31, 1), (7, 8, 9), (3, 4, 5)]


PROMPT = [*range(100, 100 + SHORTEST_SHARED)]


def answer(name: str, ids: list[int], prompt=PROMPT, index: int = 0) -> TrainSample:
    made = sample(name, [*prompt, *ids], [0] * len(prompt) + [1] * len(ids))
    return replace(made, index=index)


def test_a_prompt_of_several_samples_is_in_the_row_once():
    """The second answer begins with the prompt's last token, whose next token is its first action."""
    n = len(PROMPT)
    other = answer("c", [4], PROMPT[:-1] + [99])
    batch = pack_row([answer("a", [8, 9]), other, answer("b", [4, 3, 2])], 1, share_prompts=True)
    assert batch.lengths_S.tolist() == [n + 2, n + 1, 4]
    assert batch.shared.length_S.tolist() == [0, 0, n - 1] and batch.shared.start_S.tolist()[2] == 0
    mine = slice(2 * n + 3, 2 * n + 7)
    assert batch.ids_T[mine].tolist() == [PROMPT[-1], 4, 3, 2]
    assert batch.target_T[mine].tolist() == [4, 3, 2, 0]
    columns = batch.columns
    assert columns.action_mask_T[mine].tolist() == [True, True, True, False]
    assert columns.logp_rollout_T[mine].tolist() == pytest.approx([-0.4, -0.3, -0.2, 0])
    assert columns.token_T[mine].tolist() == [n, n + 1, n + 2, n + 3]
    assert columns.lag_T[mine].tolist() == [2, 2, 2, 0]
    short = [answer(name, [4], PROMPT[1:]) for name in "ab"]
    assert pack_row(short, 1, share_prompts=True).shared is None, "it is too short"
    assert pack_row([answer("a", [1]), answer("b", [2])], 1).shared is None, "nobody asked for it"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 4))
def test_sharing_prompts_changes_no_number_of_a_sample(answers, alignment):
    """Numbers at positions are numbers at the tokens of samples, in both directions."""
    prompts = [PROMPT, PROMPT[::-1], PROMPT[2:], [*PROMPT, 5]]
    samples = [answer(str(i), [*range(n)], prompts[p], index=i) for i, (p, n) in enumerate(answers)]
    apart, together = (pack_row(samples, alignment, share_prompts) for share_prompts in (False, True))
    own = {sample.index: sample.tokens.ids.astype(np.float32) for sample in samples}
    for batch in (apart, together):
        predicted = by_sample(batch, batch.target_T)
        assert all(predicted[i][1:].tolist() == ids[1:].tolist() for i, ids in own.items())
        found = by_sample(batch, column_of(batch, own))
        assert all(found[i][1:].tolist() == ids[1:].tolist() for i, ids in own.items())
        for column in ("logp_rollout_T", "action_mask_T"):
            values = by_sample(batch, getattr(batch.columns, column))
            name = column.removesuffix("_T")
            for sample in samples:
                assert values[sample.index][1:].tolist() == getattr(sample.tokens, name)[1:].tolist()
    num_repeated = len(answers) - len({p for p, _ in answers if p != 2}) - sum(p == 2 for p, _ in answers)
    assert (together.shared is not None) == (num_repeated > 0)


def test_an_empty_microbatch_is_one_dummy_without_actions():
    batch = pack_row([], alignment=4)
    assert batch.names == () and batch.lengths_S.tolist() == [4]
    assert not batch.columns.action_mask_T.any() and batch.padding_T.all()


def test_arrays_of_different_lengths_are_refused_by_name():
    broken = sample("prompt3#1", [1, 2, 3], [0, 1, 1])
    broken = replace(broken, tokens=replace(broken.tokens, ids=broken.tokens.ids[:2]))
    with pytest.raises(ValueError, match="prompt3#1.* 2, 3, 3, 3 entries"):
        pack_row([broken], 1)


def with_routes(one: TrainSample, routes, dtype=np.uint8) -> TrainSample:
    return replace(one, tokens=replace(one.tokens, routes=np.array(routes, dtype)))


def test_routes_belong_to_the_tokens_themselves():
    """Two layers with one expert each; the engine told nothing of the second sample, and nothing of the last tokens."""
    first = with_routes(sample("a", [5, 6, 7], [0, 1, 1]), [[[1], [2]], [[3], [4]]])
    last = with_routes(sample("c", [4, 3], [0, 1]), [[[255], [6]]])
    batch = pack_row([first, sample("b", [8, 9], [0, 1]), last], alignment=4)
    known = batch.routes.is_known_T
    assert known.tolist() == [True, True, False, False] + [False] * 4 + [True, False, False, False]
    assert batch.routes.expert_TLK[known].tolist() == [[[1], [2]], [[3], [4]], [[255], [6]]]
    assert pack_row([sample("b", [8, 9], [0, 1])], 1).routes is None


def test_answers_share_a_prompt_if_the_engine_chose_the_same_experts_for_it():
    """All but the last token of the prompt is shared, which has choices of its own. A token counts once for each sample
    that has it; the padding counts nothing."""
    n = len(PROMPT)

    def answer_with(name: str, ids: list[int], changed: int | None = None) -> TrainSample:
        routes = np.arange(n + len(ids) - 1, dtype=np.uint8)[:, None, None]
        if changed is not None:
            routes[changed] = 200
        return with_routes(answer(name, ids), routes)

    of_last, of_shared = answer_with("b", [4, 3, 2], n - 1), answer_with("c", [5], n - 2)
    samples = [answer_with("a", [8, 9]), of_last, of_shared, answer("d", [6]), answer_with("e", [7])]
    batch = pack_row(samples, 4, share_prompts=True)
    assert batch.shared.length_S.tolist() == [0, n - 1, 0, 0, n - 1]
    assert batch.lengths_S.tolist() == [n + 4, 4, n + 4, n + 4, 4]
    mine = slice(n + 4, n + 8)
    assert batch.routes.expert_TLK[mine, 0, 0].tolist() == [200, n, n + 1, 0]
    assert batch.routes.is_known_T[mine].tolist() == [True, True, True, False]
    assert batch.routes.is_known_T.sum() == (n + 1) + 3 + n + 1
    counts = multiplicity(batch)
    assert counts.tolist()[: n + 4] == [3] * (n - 1) + [1] * 3 + [0, 0]
    assert counts[n + 4 :].max() == 1 and counts.sum() == sum(len(sample.tokens.ids) for sample in samples)
    nothing = replace(of_last.tokens, routes=of_last.tokens.routes[: n - 3])
    short = pack_row([replace(of_last, tokens=nothing)] * 2, 1, share_prompts=True)
    assert short.shared.length_S.tolist() == [0, n - 1] and short.routes.is_known_T.sum() == n - 3


def test_routes_of_more_than_256_experts_have_16_bits():
    batch = pack_row([with_routes(sample("a", [5, 6], [0, 1]), [[[383, 511]], [[255, 256]]], np.uint16)], 1)
    assert batch.routes.expert_TLK.tolist() == [[[383, 511]], [[255, 256]]]


def test_more_routes_than_tokens_are_refused_by_name():
    with pytest.raises(ValueError, match="sample a: routes has 2"):
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
