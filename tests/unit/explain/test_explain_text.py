"""What is printed of answers and tokens."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
from rich.console import Console
from test_explain_causes import answer

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


def test_a_step_without_a_signal_has_no_table_of_other_numbers():
    step = SimpleNamespace(number=7, answers=[answer(0, 1)], logged=lambda name: None, usual=lambda name: 0.4)
    step.records = {7: {"groups/zero_signal": 1.0}}
    console = Console(record=True, width=200, file=io.StringIO())
    show(Explanation(step, "grad_norm", "other weights", False, None, [], []), WORDS, console)
    told = console.export_text()
    assert "the step trained nothing: in 1 groups of answers" in told and "answers by" not in told
    assert told.rstrip().endswith("nothing that is known to be odd was found, with other weights than the run's")
