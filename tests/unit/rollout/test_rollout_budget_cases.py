"""The table of the thinking budget, with an engine that emits chosen tokens; and what holds for random answers.

test_rollout_native.py has the same table on vLLM."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from budget_cases import CASES, EOS, MODES, D, M, N, O, check, x, y

from megatron_rl.rollout.program import Call, Completion, Program, Transcript, as_rollout, next_call, replay
from megatron_rl.rollout.programs.thinking import NativeBudget, TwoCallBudget
from megatron_rl.types import Rollout, Tokens

PROMPT = [5, 6, O, 9]
"""The prompt has opened the thought, and a token follows."""


def program(mode: str, n: int, m: int, delimiter=(D,), closing=None, before: int = 1) -> Program:
    closing = closing or delimiter
    if mode == "native":
        return NativeBudget(O, delimiter, closing, n, m, before)
    return TwoCallBudget(delimiter, closing if mode == "two_call" else None, n, m)


class Stub:
    """An engine that emits chosen tokens, and keeps a thinking budget by the rule of vLLM's model runner V2."""

    def __init__(self, wants, delimiter=(D,), closing=(D,)) -> None:
        self.wants, self.delimiter, self.closing = wants, list(delimiter), list(closing)
        self.chosen: list[bool] = []
        """Whether the token at each index was chosen, for those that this engine has emitted."""

    def answer(self, call: Call, ids: list[int], most: int | None = None) -> Completion:
        """The tokens of a call. After `most` the engine is lost."""
        ids, new = list(ids), []
        while len(new) < call.max_tokens and (most is None or len(new) < most):
            forced = None if call.thinking_token_budget is None else self.forced(ids, call.thinking_token_budget)
            token = self.wants(len(ids)) if forced is None else forced
            ids.append(token)
            new.append(token)
            self.chosen.append(forced is None)
            if token == EOS or token in call.stops:
                break
        count = range(len(ids) - len(new), len(ids))
        return Completion(new, [-0.5 - i for i in count], list(count), bool(new) and new[-1] == EOS)

    def forced(self, response: list[int], budget: int) -> int | None:
        ids = PROMPT + response
        start, end = last(ids, [O]), last(ids, self.delimiter)
        if start < 0 or start <= end or len(ids) - start - 1 < budget:
            return None
        sizes = [size for size in range(1, len(self.closing)) if ids[-size:] == self.closing[:size]]
        return self.closing[max(sizes, default=0)]


def last(ids: list[int], part: list[int]) -> int:
    return max((i for i in range(len(ids) - len(part) + 1) if ids[i : i + len(part)] == part), default=-1)


def carry_out(program: Program, stub: Stub) -> Transcript:
    transcript = Transcript()
    while call := next_call(program, transcript):
        transcript.sampled(stub.answer(call, transcript.ids))
    return transcript


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_the_table(name, mode):
    case = CASES[name]
    if mode not in case.outcomes:
        return
    transcript = carry_out(program(mode, case.n, case.m), Stub(case.wants))
    sample, tokens = as_rollout(PROMPT, transcript, (D,), case.n)
    check(case.outcomes[mode], tokens.ids[4:].tolist(), tokens.action_mask[4:].tolist(), sample, len(PROMPT))


def test_the_table_of_the_page_is_true():
    text = (Path(__file__).parents[3] / "docs/reasoning.md").read_text()
    rows = re.findall(r"^\| ([^:|`]+): `[^|]*\| `([^`]+)`[^|]*\| (.+) \|$", text, re.MULTILINE)
    assert len(rows) == 5 and {name for name, *_ in rows} <= CASES.keys()
    for name, closed, truncated in rows:
        outcomes = CASES[name].outcomes
        assert written(outcomes["two_call"]) == written(outcomes["native"]) == closed
        if truncated == "the same":
            assert outcomes["truncate"] == outcomes["two_call"]
        else:
            assert truncated == f"`{written(outcomes['truncate'])}`, cut" and outcomes["truncate"].cut


def written(outcome) -> str:
    names = {EOS: "EOS", O: "O", D: "D", x: "x", y: "y"}
    return " ".join(f"[{names[t]}]" if i in outcome.forced else names[t] for i, t in enumerate(outcome.ids))


@pytest.mark.parametrize(
    ("script", "delimiter", "closing", "forced"),
    [
        ([x, x, x, x], (3, 4), (3, 4), [3, 4]),
        ([x, x, x, 3], (3, 4), (3, 4), [4]),  # the beginning of the delimiter is there
        ([x, x, x, x], (3, 4), (6, 7, 3, 4), [6, 7, 3, 4]),
        ([x, x, x, 3], (3, 4), (6, 7, 3, 4), [6, 7, 3, 4]),  # that of the delimiter is not that of the closing
        ([x, x, x, 6], (3, 4), (6, 7, 3, 4), [7, 3, 4]),
        ([x, 6, 7, 3], (3, 4), (6, 7, 3, 4), [4]),
        ([x, 3, 3, 3], (3, 3, 4), (3, 3, 4), [4]),  # the longest beginning
    ],
)
@pytest.mark.parametrize("mode", ["two_call", "native"])
def test_a_closing_that_the_thought_has_begun_is_completed(mode, script, delimiter, closing, forced):
    stub = Stub(lambda i: script[i] if i < N else y, delimiter, closing)
    transcript = carry_out(program(mode, N, M, delimiter, closing), stub)
    sample, tokens = as_rollout(PROMPT, transcript, delimiter, N)
    assert tokens.ids[4:].tolist() == [*script, *forced, y, y, y]
    assert tokens.action_mask[4:].tolist() == [True] * N + [False] * len(forced) + [True] * M
    assert sample.thought_cut and sample.num_thought_tokens <= N


def test_an_engine_that_does_not_keep_the_budget_ends_the_run():
    class Deaf(Stub):
        def forced(self, response, budget):
            return None

    with pytest.raises(ValueError, match=r"force \(3,\).*\(7,\)"):
        carry_out(program("native", N, M), Deaf(lambda _: x))
    carry_out(program("native", N, M), Deaf(CASES["delimiter at n - 1"].wants))


CLOSINGS = [((3,), (3,)), ((3,), (5, 6, 3)), ((3, 4), (3, 4)), ((3, 4), (5, 3, 4)), ((3, 3), (3, 3))]


def random_answer(mode: str, seed: int, cut: bool = False) -> tuple[Stub, tuple, Rollout, Tokens]:
    """An answer by an engine that chooses at random; with `cut` the engine is lost on the way, and another one goes on
    from the tokens that it had."""
    choice = random.Random(seed)
    delimiter, closing = choice.choice(CLOSINGS)
    n, m = choice.randint(1 if mode == "truncate" else 0, 7), choice.randint(1, 5)
    chosen = [choice.choice([EOS, O, 3, 4, 5, 6, x]) for _ in range(40)]
    stub, its = Stub(lambda i: chosen[i], delimiter, closing), program(mode, n, m, delimiter, closing)
    transcript = carry_out(its, stub)
    if cut:
        whole = list(transcript.ids), list(transcript.is_action), transcript.stopped
        transcript = go_on(its, stub, lost_after=choice.randint(0, 12))
        assert (transcript.ids, transcript.is_action, transcript.stopped) == whole
    return stub, (delimiter, n, m), *as_rollout(PROMPT, transcript, delimiter, n)


def go_on(program: Program, stub: Stub, lost_after: int) -> Transcript:
    transcript, emitted = Transcript(), Completion((), (), (), False)
    while (call := next_call(program, transcript)) and lost_after:
        part = stub.answer(call, transcript.ids, most=lost_after)
        lost_after -= len(part.ids)
        parts = zip((emitted.ids, emitted.logp, emitted.version), (part.ids, part.logp, part.version), strict=True)
        emitted = Completion(*([*a, *b] for a, b in parts), False)
        transcript.sampled(part)
        if not lost_after:
            break
    transcript, call = replay(program, emitted, {EOS})
    while call is not None:
        transcript.sampled(stub.answer(call, transcript.ids))
        call = next_call(program, transcript)
    return transcript


@pytest.mark.parametrize("mode", MODES)
def test_no_answer_breaks_its_budget_and_the_mask_says_who_chose_each_token(mode):
    """10,000 random answers in all modes together."""
    num_cut = 0
    for seed in range(3400):
        stub, (delimiter, n, m), sample, tokens = random_answer(mode, seed)
        response, actions = tokens.ids[4:].tolist(), tokens.action_mask[4:].tolist()
        end = first(response, delimiter)
        assert sample.num_thought_tokens <= n == sample.thought_budget
        if end is not None:
            assert sum(actions[:end]) <= n and len(response) - end - len(delimiter) <= m
        else:
            assert len(response) <= n and (sample.finish == "stop" or mode == "truncate")
        assert all(response[i] == stub.wants(i) for i, is_action in enumerate(actions) if is_action)
        if mode == "native":  # the engine has emitted all tokens, in their order
            assert actions == stub.chosen[: len(response)]
        forced = ~tokens.action_mask
        assert (tokens.logp_rollout[forced] == 0).all() and (tokens.version[forced] == -1).all()
        assert (tokens.logp_rollout[~forced] < 0).all() and (tokens.version[~forced] >= 0).all()
        num_cut += sample.thought_cut
    assert 500 < num_cut < 3000


def first(ids: list[int], part: tuple[int, ...]) -> int | None:
    return next((i for i in range(len(ids) - len(part) + 1) if tuple(ids[i : i + len(part)]) == part), None)


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_goes_on_from_any_of_its_tokens_with_its_budget(mode):
    for seed in range(1000):
        random_answer(mode, seed, cut=True)
