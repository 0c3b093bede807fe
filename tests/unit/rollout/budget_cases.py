"""The rules of a thinking budget as cases: what a model would sample, and what becomes of it in each mode. The page
docs/reasoning.md shows some of them.

The delimiter is D, the opening O. The prompt has opened the thought, and one more token follows. A model has a script:
the token that it samples at each index of the response. Where a token is forced, that of the script is not sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

EOS, O, D = 1, 2, 3  # noqa: E741
x, y = 7, 8
MODES = ("two_call", "native", "truncate")
N, M = 4, 3
"""The budgets of thought and answer."""


class Outcome(NamedTuple):
    ids: list[int]
    forced: list[int] = []
    """The indices of the tokens that are no actions."""
    finish: str = "length"
    cut: bool = False
    """`Rollout.thought_cut`."""
    num_thought: int | None = None
    """`Rollout.num_thought_tokens`; None: the tokens before the first delimiter."""


class Case(NamedTuple):
    script: list[int]
    """Its last token is sampled again and again."""
    outcomes: dict[str, Outcome]
    n: int = N
    m: int = M

    def wants(self, index: int) -> int:
        return self.script[min(index, len(self.script) - 1)]


def same(*outcome) -> dict[str, Outcome]:
    """All modes have this outcome."""
    return dict.fromkeys(MODES, Outcome(*outcome))


def closed(ids: Sequence[int], at: int, finish: str = "length") -> dict[str, Outcome]:
    """The thought is closed by force, or cut at the same place."""
    forced = Outcome(list(ids), [at], finish, True)
    return {"two_call": forced, "native": forced, "truncate": Outcome(list(ids[:at]), [], "length", True, at)}


CASES = {
    "delimiter at 0": Case([D, y], same([D, y, y, y])),
    "delimiter at n - 1": Case([x, x, x, D, y], same([x, x, x, D, y, y, y])),
    "delimiter at n": Case([x, x, x, x, D, y], closed([x, x, x, x, D, y, y, y], at=4)),
    "delimiter after n": Case([x, x, x, x, x, D, y], closed([x, x, x, x, D, D, y, y], at=4)),
    "delimiter twice": Case([x, D, y, D, y], same([x, D, y, D, y])),
    "no delimiter": Case([x], closed([x, x, x, x, D, x, x, x], at=4)),
    "end in the reasoning": Case([x, EOS], same([x, EOS], [], "stop", False, 2)),
    "end at n - 1": Case([x, x, x, EOS], same([x, x, x, EOS], [], "stop", False, 4)),
    "end at n": Case([x, x, x, x, EOS, y], closed([x, x, x, x, D, y, y, y], at=4)),
    "end after the closing": Case([x, x, x, x, x, EOS], closed([x, x, x, x, D, EOS], at=4, finish="stop")),
    "end as the last token of the answer": Case([x, D, y, y, EOS], same([x, D, y, y, EOS], [], "stop")),
    "end after the last token of the answer": Case([x, D, y, y, y, EOS], same([x, D, y, y, y])),
    "end right after the delimiter": Case([x, D, EOS], same([x, D, EOS], [], "stop")),
    "a budget of one": Case([D, y], same([D, y, y, y]), n=1),
    "a budget of one is used up": Case([x, D, y], closed([x, D, y, y, y], at=1), n=1),
    "a budget of none": Case([x], {m: Outcome([D, x, x, x], [0], "length", True) for m in ("two_call", "native")}, n=0),
    "the thought opens another one": Case([x, O, x], closed([x, O, x, x, D, x, x, x], at=4)),
    "the thought opens another one at n - 1": Case([x, x, x, O, y], closed([x, x, x, O, D, y, y, y], at=4)),
    "the answer opens another thought": Case([D, O, x], same([D, O, x, x, x, x, x, x, x]), m=8),
    "the answer ends with an opening": Case([D, y, y, O], same([D, y, y, O])),
}


def check(outcome: Outcome, response: list[int], action_mask: list[bool], sample, num_prompt: int) -> None:
    """Compare a sample with the outcome of a case."""
    assert response == outcome.ids
    assert [i for i, is_action in enumerate(action_mask) if not is_action] == outcome.forced
    thought = response.index(D) if outcome.num_thought is None else outcome.num_thought
    assert (sample.finish, sample.thought_cut, sample.num_thought_tokens) == (outcome.finish, outcome.cut, thought)
    assert (sample.length, sample.num_prompt_tokens) == (num_prompt + len(response), num_prompt)
    assert sample.num_actions == len(response) - len(outcome.forced)
