"""What is printed of answers and tokens."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from rich.console import Console
from test_explain_causes import answer

from megatron_rl.explain.step import updates_of
from megatron_rl.explain.text import Explanation, describe_answer, describe_token, show

WORDS = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x" * len(ids))


def test_an_answer_has_one_advantage_or_each_token_its_own():
    one = answer(0, 1)
    assert describe_answer(one).endswith("20 tokens, reward 1, advantage 1")
    assert describe_token(one, 22, WORDS).endswith("version 9, advantage 1")
    own = np.where(one.tokens.action_mask, np.arange(23.0), 0.0)
    seen = answer(0, 1, advantage=0.0).with_numbers(one.numbers | {"advantage": own})
    assert describe_answer(seen).endswith("20 tokens, reward 1, mean advantage 12.5")
    assert describe_token(seen, 22, WORDS).endswith("version 9, advantage 22")


def test_an_answer_tells_the_updates_that_train_on_it():
    share = SimpleNamespace(minibatches=(((0,), (1,)), ((2,),)), index=np.array([4, 2, 3]))
    again = SimpleNamespace(minibatches=(((0,),), ((1, 2),)), index=np.array([3, 4, 2]))
    assert updates_of([[share], [again]]) == {4: [0, 3], 2: [0, 3], 3: [1, 2]}
    one = replace(answer(0, 1), updates=[1, 2])
    assert describe_answer(one, 4).endswith("reward 1, advantage 1, in updates 2 and 3 of 4")
    assert describe_answer(one, 1).endswith("reward 1, advantage 1")


def test_a_step_without_a_signal_has_no_table_of_other_numbers():
    step = SimpleNamespace(number=7, answers=[answer(0, 1)], logged=lambda name: None, usual=lambda name: 0.4)
    step.records = {7: {"groups/zero_signal": 1.0}}
    console = Console(record=True, width=200, file=io.StringIO())
    show(Explanation(step, "grad_norm", "other weights", False, None, [], []), WORDS, console)
    told = console.export_text()
    assert "the step trained nothing: in 1 groups of answers" in told and "answers by" not in told
    assert told.rstrip().endswith("nothing that is known to be odd was found, with other weights than the run's")
