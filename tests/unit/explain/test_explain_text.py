"""What is printed of answers and tokens."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from test_explain_causes import answer

from megatron_rl.explain.text import describe_answer, describe_token

WORDS = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x" * len(ids))


def test_an_answer_has_one_advantage_or_each_token_its_own():
    one = answer(0, 1)
    assert describe_answer(one).endswith("20 tokens, reward 1, advantage 1")
    assert describe_token(one, 22, WORDS).endswith("version 9, advantage 1")
    own = np.where(one.tokens.action_mask, np.arange(23.0), 0.0)
    seen = answer(0, 1, advantage=0.0).with_numbers(one.numbers | {"advantage": own})
    assert describe_answer(seen).endswith("20 tokens, reward 1, mean advantage 12.5")
    assert describe_token(seen, 22, WORDS).endswith("version 9, advantage 22")
