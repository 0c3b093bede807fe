"""Prompts that became easy rest, and come back."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.loop.active_sampling import MAX_REST, PassRates


def test_an_easy_prompt_rests_for_longer_each_time_and_not_after_a_wrong_answer():
    rates, drawn = PassRates(), []
    for epoch in range(40):
        if not rates.rests("row", epoch):
            drawn.append(epoch)
            rates.record("row", 0.875 if epoch == 28 else 1.0, epoch)
    assert drawn == [0, 2, 5, 10, 19, 28, 29, 31, 34, 39]
    rates = PassRates()
    rates.record("row", 1.0, 0)
    rates.record("row", 0.875, 2)
    assert not rates.rests("row", 3)
    rates.record("row", 1.0, 3)
    assert rates.rests("row", 4) and not rates.rests("row", 5) and not rates.rests("other", 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0])), max_size=60))
def test_a_restored_table_decides_as_the_saved_one(groups):
    rates, restored, epoch = PassRates(), PassRates(), 0
    rested = dict.fromkeys("abc", 0)
    for uid, rate in groups:
        rates.record(uid, rate, epoch)
        epoch += 1
        restored.restore(json.loads(json.dumps(rates.state())))
        for name in "abc":
            assert restored.rests(name, epoch) == rates.rests(name, epoch)
            rested[name] = rested[name] + 1 if rates.rests(name, epoch) and name != uid else 0
            assert rested[name] <= MAX_REST
        if rate < 1:
            assert not rates.rests(uid, epoch)
