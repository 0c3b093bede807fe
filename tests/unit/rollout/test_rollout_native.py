"""The thinking budget on the real engine: its table, with a model that is made to want chosen tokens; vLLM's own
budget; and a delimiter of two tokens."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch
from budget_cases import CASES, EOS, MODES, D, O, check
from pushes import flat, sampled, with_push
from tiny_references import reference_logp
from transformers import AutoModelForCausalLM

from megatron_rl.rollout.program import find_delimiter
from megatron_rl.rollout.programs.budgets import Budgets
from megatron_rl.rollout.progress import MAX_SAMPLES, ROW
from megatron_rl.types import Mesh, Prompt

LARGEST, ANSWER = 40, 20
THOUGHT = {"kind": "column", "name": "n", "high": LARGEST}
TEMPERATURE = 2.0
"""It is high, so that thoughts end soon, and the two tokens of a delimiter sometimes follow each other."""
ROLLOUT = {"max_prompt_tokens": 8, "max_response_tokens": 64, "sampling": {"temperature": TEMPERATURE}}


@pytest.fixture(scope="module")
def native(make_stage, folders):
    return make_stage(folders[0], Mesh(), **ROLLOUT, thinking=thinking("native"))


@pytest.fixture
def stage(native, folders):
    """An engine that knows vLLM's thinking budget. `use` chooses the mode, for one test."""
    budgets = native.engine._budgets
    native.load(folders[0])
    yield native
    native.engine._budgets = budgets


def thinking(mode: str, response_tokens: int = ANSWER, **others) -> dict:
    low = {"low": 1} if mode == "truncate" else {}
    return {"mode": mode, "thought_tokens": THOUGHT | low, "response_tokens": response_tokens, **others}


def use(stage, folder, *arguments, delimiter: str = "</think>", **keys) -> None:
    changes = {"thinking": thinking(*arguments, **keys), "delimiter": delimiter}
    config = stage.config.model_validate(stage.config.model_dump() | changes)
    stage.engine._budgets = Budgets(folder, config, on_gpu=False)


def script(stage, monkeypatch, wants: dict[int, callable], num_prompt: int) -> None:
    """Make the model want a token at each index of the response, by the first token of the prompt."""
    runner = stage.engine.sampler._thread.engine.model_executor.driver_worker.worker.model_runner
    compute_logits = runner.model.compute_logits

    def compute(hidden, *others):
        logits = compute_logits(hidden, *others)
        batch = runner.input_batch
        for row in range(len(batch.req_ids)):
            index = int(batch.num_tokens_no_spec[row]) - num_prompt
            logits[row] = -50.0
            logits[row, wants[int(batch.token_ids_cpu[row, 0])](index)] = 50.0
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", compute)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", sorted({case.m for case in CASES.values()}))
def test_the_table_on_vllm(stage, folders, monkeypatch, mode, m):
    cases = [case for case in CASES.values() if case.m == m and mode in case.outcomes]
    use(stage, folders[0], mode, m)
    script(stage, monkeypatch, {20 + i: case.wants for i, case in enumerate(cases)}, num_prompt=4)
    prompts = [Prompt(str(i), (20 + i, 6, O, 9), "", {"n": case.n}) for i, case in enumerate(cases)]
    groups = generated(stage, prompts, 2, seed=1)
    for case, group in zip(cases, groups, strict=True):
        for sample, tokens in group:
            check(case.outcomes[mode], tokens.ids[4:].tolist(), tokens.action_mask[4:].tolist(), sample, 4)
            assert sample.thought_budget == case.n


def generated(stage, prompts: list[Prompt], num_samples: int, seed: int) -> list[list[tuple]]:
    return stage.run(stage.generate(prompts, num_samples, stage.engine.weights.version, seed))


def asked(count: int, n: int) -> list[Prompt]:
    return [Prompt(f"row {i}", (5 + i, 6, O, 9), "", {"n": n}) for i in range(count)]


def answers(stage, prompts: list[Prompt], num_samples: int, seed: int) -> list[tuple]:
    """What is known of each answer."""
    return [known(*answer) for answer in flat(generated(stage, prompts, num_samples, seed))]


def known(sample, tokens) -> tuple:
    return tokens.ids.tolist(), tokens.action_mask.tolist(), sample.finish, sample.thought_cut


@pytest.mark.deep
def test_vllms_budget_and_two_calls_give_the_same_answers(stage, folders):
    """The noise of a token belongs to its answer and its position, so both modes give the same answers, up to the
    rounding of batches of other sizes. Another seed gives others."""
    prompts, num_samples = asked(8, n=10), 64
    found = {}
    for mode, seed in (("two_call", 1), ("native", 1), ("native", 2)):
        use(stage, folders[0], mode, 6)
        found[mode, seed] = answers(stage, prompts, num_samples if seed == 1 else 8, seed)
    assert num_equal(found["two_call", 1], found["native", 1]) >= 8 * num_samples - 1
    ends = Counter((cut, finish) for _, _, finish, cut in found["native", 1])
    assert min(ends[cut, finish] for cut in (False, True) for finish in ("stop", "length")) >= 20
    assert len({tuple(ids) for ids, *_ in found["native", 1]} & {tuple(ids) for ids, *_ in found["native", 2]}) < 20


def num_equal(answers: list[tuple], others: list[tuple]) -> int:
    return sum(a == b for a, b in zip(answers, others, strict=True))


@pytest.mark.parametrize("count", [6, 10, 11], ids=["in the thought", "before the closing", "after the closing"])
def test_vllms_budget_survives_a_push(stage, folders, count):
    """The tokens before the push are those of an answer without one, up to the rounding of batches of other sizes, and
    the budgets hold."""
    use(stage, folders[0], "native", 6)
    prompts, n, version = asked(16, n=10), 10, stage.engine.weights.version
    unbroken = generated(stage, prompts, 8, seed=7)
    stage.trainers.begin_push(folders[1], version + 1)
    groups, *_ = with_push(stage, prompts, 8, version, sampled(count), version + 1)
    stage.trainers.end_push()
    num_crossed, others = 0, []
    for (sample, tokens), (_, whole) in zip(flat(groups), flat(unbroken), strict=True):
        response, actions = tokens.ids[4:].tolist(), tokens.action_mask[4:].tolist()
        versions = tokens.version[4:][tokens.action_mask[4:]]
        num_old = int((versions == version).sum())
        assert (np.diff(versions) >= 0).all()
        before = tokens.ids[tokens.action_mask][:num_old].tolist()
        if before != whole.ids[whole.action_mask][:num_old].tolist():
            others.append((before, whole.ids.tolist()))
        assert [i for i, action in enumerate(actions) if not action] == ([n] if sample.thought_cut else [])
        assert D in response[: n + 1] or (EOS in response[:n] and len(response) <= n)
        num_crossed += sample.thought_cut and 0 < num_old < len(versions)
    assert num_crossed >= 16 and len(others) <= 1, others


@pytest.mark.parametrize("mode", MODES)
def test_a_thought_goes_on_in_another_engine_with_its_budget(stage, folders, tmp_path, mode):
    use(stage, folders[0], mode, 6)
    prompts = asked(8, n=10)

    def answer(earlier=()) -> list[tuple]:
        async def all_of_them():
            calls = (stage.answer(i, i, prompt, range(4), earlier) for i, prompt in enumerate(prompts))
            return await asyncio.gather(*calls)

        return [
            (t.ids.tolist(), t.action_mask.tolist(), s.finish, s.thought_cut) for s, t in flat(stage.run(all_of_them()))
        ]

    whole = answer()
    rows = []
    for i, (ids, actions, *_) in enumerate(whole):
        # vLLM emits the closing itself if it keeps the budget
        emitted = [token for token, action in zip(ids[4:], actions[4:], strict=True) if action or mode == "native"]
        name = i // 4 * MAX_SAMPLES + i % 4
        rows += [(name, token, 1, -1.0) for token in emitted[: i % 14]]
    np.array(rows, ROW).tofile(tmp_path / "lost.tokens")
    assert num_equal(answer([tmp_path / "lost.tokens"]), whole) >= 31


def test_each_answer_has_the_budget_that_it_was_asked_with(stage, folders):
    for mode in MODES:
        use(stage, folders[0], mode, 6)
        prompt = Prompt("row", (5, 6, O, 9), "", {"n": 40}, thought_budgets=(1, 2, 30, 3))
        [group] = generated(stage, [prompt], 4, seed=3)
        assert [sample.thought_budget for sample, _ in group] == [1, 2, 30, 3]
        assert all(sample.num_thought_tokens <= sample.thought_budget for sample, _ in group)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_has_closed_its_thought_has_no_budget(stage, folders, mode):
    use(stage, folders[0], mode, 6)
    prompts = [Prompt("a", (5, O, D), "", {"n": 3}), Prompt("b", (5, O, D, 19, 19), "", {"n": 3})]  # 19 is a space
    groups = generated(stage, prompts, 8, seed=3)
    for sample, tokens in flat(groups):
        assert tokens.action_mask[sample.num_prompt_tokens :].all() and not sample.thought_cut
        assert (sample.thought_budget, sample.num_thought_tokens) == (None, 0)
        assert sample.length - sample.num_prompt_tokens <= 6


def test_vllms_budget_needs_a_prompt_that_opens_the_thought(stage, folders):
    use(stage, folders[0], "native")
    for ids in ((5, 6), (5, O, D, 6)):
        with pytest.raises(ValueError, match="'<think>'"):
            generated(stage, [Prompt("row", ids, "", {"n": 3})], 1, seed=0)


def test_a_row_with_a_wrong_budget_is_refused(stage, folders):
    use(stage, folders[0], "two_call")
    for columns in ({}, {"n": -1}, {"n": 41}, {"n": 3.0}, {"n": True}):
        with pytest.raises(ValueError, match="`n`.*from 0 to 40"):
            generated(stage, [Prompt("row", (5,), "", columns)], 1, seed=0)
    given = Prompt("row", (5,), "", {"n": 3}, thought_budgets=(41,))
    with pytest.raises(ValueError, match="of 41.*of 0 to 40"):
        generated(stage, [given], 1, seed=0)


def test_a_delimiter_of_two_tokens_is_completed_and_forced_tokens_are_no_actions(stage, folders):
    """The tokens of `=?`. The thought has sampled both, the first one, or none when its budget ends."""
    delimiter = (16, 18)
    use(stage, folders[0], "two_call", 6, delimiter="=?")
    prompts = [Prompt(str(i), (5 + i, 6, 15), "", {"n": 10}) for i in range(8)]
    groups = generated(stage, prompts, 64, seed=1)
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    seen = set()
    for sample, tokens in flat(groups):
        response, action = tokens.ids[3:].tolist(), tokens.action_mask[3:]
        start = find_delimiter(response, delimiter)
        if start is None:
            assert response[-1] == 1 and len(response) <= 10 and sample.finish == "stop"
            seen.add("ended in the thought")
            continue
        thought, answer = response[: start + 2], response[start + 2 :]
        assert sample.num_thought_tokens == start <= 10 and 1 not in thought
        assert 1 <= len(answer) <= 6 and 1 not in answer[:-1]
        assert sample.finish == ("stop" if answer[-1] == 1 else "length")
        assert sample.finish == "stop" or len(answer) == 6
        forced = np.flatnonzero(~action)
        assert sample.thought_cut == bool(len(forced)) and sample.num_actions == action.sum()
        assert forced.tolist() in ([], [10], [10, 11])
        if sample.thought_cut:
            assert start + 2 == forced[-1] + 1 and (tokens.logp_rollout[3:][forced] == 0).all()
        seen.add(f"{len(forced)} forced")
    assert seen == {"ended in the thought", "0 forced", "1 forced", "2 forced"}

    for _, tokens in groups[0]:
        difference = np.abs(reference_logp(model, tokens.ids, TEMPERATURE) - tokens.logp_rollout)[tokens.action_mask]
        assert difference.max() < 1e-5  # fp32 rounding, as without a budget: call 2 saw the whole of call 1

    again = generated(stage, prompts[:2], 16, seed=5), generated(stage, prompts[:2], 16, seed=5)
    for (_, a), (_, b) in zip(*map(flat, again), strict=True):
        assert a.ids.tolist() == b.ids.tolist() and a.logp_rollout.tolist() == b.logp_rollout.tolist()
