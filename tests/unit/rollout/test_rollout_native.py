"""The table of the thinking budget on vLLM, whose model is made to want chosen tokens, and vLLM's own budget."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from budget_cases import CASES, EOS, MODES, D, O, check
from pushes import flat, sampled, with_push

from megatron_rl.rollout.budgets import Budgets
from megatron_rl.rollout.progress import MAX_SAMPLES, ROW
from megatron_rl.types import Mesh, Prompt

LARGEST, ANSWER = 40, 20
THOUGHT = {"kind": "column", "name": "n", "high": LARGEST}
ROLLOUT = {"max_prompt_tokens": 8, "max_response_tokens": 64, "sampling": {"temperature": 2.0}}


@pytest.fixture(scope="module")
def stage(make_stage, folders):
    """An engine that knows vLLM's thinking budget. `use` chooses the mode."""
    stage = make_stage(folders[0], Mesh(), **ROLLOUT, thinking=thinking("native"))
    stage.push(folders[0], 0)
    return stage


def thinking(mode: str, response_tokens: int = ANSWER, **others) -> dict:
    low = {"low": 1} if mode == "truncate" else {}
    return {"mode": mode, "thought_tokens": THOUGHT | low, "response_tokens": response_tokens, **others}


def use(stage, folder, *arguments, **keys) -> None:
    config = stage.config.model_validate(stage.config.model_dump() | {"thinking": thinking(*arguments, **keys)})
    stage.engine._budgets = Budgets(folder, config, on_gpu=False)


def script(stage, monkeypatch, wants: dict[int, callable], num_prompt: int) -> None:
    """Make the model want a token at each index of the response, by the first token of the prompt."""
    runner = stage.engine._thread.engine.model_executor.driver_worker.worker.model_runner
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
    groups = stage.run(stage.engine.generate(prompts, 2, 0, seed=1))
    for case, group in zip(cases, groups, strict=True):
        for sample, tokens in group:
            check(case.outcomes[mode], tokens.ids[4:].tolist(), tokens.action_mask[4:].tolist(), sample, 4)
            assert sample.thought_budget == case.n


def asked(count: int, n: int) -> list[Prompt]:
    return [Prompt(f"row {i}", (5 + i, 6, O, 9), "", {"n": n}) for i in range(count)]


def answers(stage, prompts: list[Prompt], num_samples: int, seed: int) -> list[tuple]:
    """What is known of each answer."""
    groups = stage.run(stage.engine.generate(prompts, num_samples, stage.engine.weights.version, seed))
    return [known(*answer) for answer in flat(groups)]


def known(sample, tokens) -> tuple:
    return tokens.ids.tolist(), tokens.action_mask.tolist(), sample.finish, sample.thought_cut


def test_vllms_budget_and_two_calls_give_the_same_answers(stage, folders):
    """The noise of a token belongs to its answer and its position, so both modes give the same answers, up to the
    rounding of batches of other sizes. With other seeds, they give outcomes with the same frequencies."""
    prompts, num_samples = asked(8, n=10), 128
    found = {}
    for mode, seed in (("two_call", 1), ("native", 1), ("native", 2)):
        use(stage, folders[0], mode, 6)
        found[mode, seed] = answers(stage, prompts, num_samples, seed)
    pairs = zip(found["two_call", 1], found["native", 1], strict=True)
    assert sum(a == b for a, b in pairs) >= 8 * num_samples - 2
    counts = [Counter(map(outcome, found[key])) for key in (("two_call", 1), ("native", 2))]
    kinds = [kind for kind in counts[0] | counts[1] if counts[0][kind] + counts[1][kind] >= 20]
    assert len(kinds) >= 10 and {cut for cut, *_ in kinds} == {False, True}
    a, b = (np.array([count[kind] for kind in kinds], float) for count in counts)
    # Two samples of equal size: (a - b)^2 / (a + b) has the mean 1 and the deviation sqrt(2) for each kind.
    statistic = ((a - b) ** 2 / (a + b)).sum()
    assert statistic < len(kinds) + 4 * np.sqrt(2 * len(kinds))
    assert len({tuple(ids) for ids, *_ in found["native", 1]} & {tuple(ids) for ids, *_ in found["native", 2]}) < 200


def outcome(answer: tuple) -> tuple:
    """Whether the thought was cut, its length, and how the answer ended."""
    ids, _, finish, cut = answer
    response = ids[4:]
    return cut, response.index(D) if D in response else None, finish


@pytest.mark.parametrize("count", [6, 10, 11], ids=["in the thought", "before the closing", "after the closing"])
def test_vllms_budget_survives_a_push(stage, folders, count):
    """The tokens before the push are those of an answer without one, and the budgets hold."""
    use(stage, folders[0], "native", 6)
    stage.push(folders[0], 10 * count)
    prompts, n = asked(16, n=10), 10
    unbroken = stage.run(stage.engine.generate(prompts, 4, 10 * count, seed=7))
    stage.trainers.begin_push(folders[1], 10 * count + 1)
    groups, *_ = with_push(stage, prompts, 4, 10 * count, sampled(count), 10 * count + 1)
    stage.trainers.end_push()
    num_crossed = 0
    for (sample, tokens), (_, whole) in zip(flat(groups), flat(unbroken), strict=True):
        response, actions = tokens.ids[4:].tolist(), tokens.action_mask[4:].tolist()
        versions = tokens.version[4:][tokens.action_mask[4:]]
        num_old = int((versions == 10 * count).sum())
        assert (np.diff(versions) >= 0).all()
        before = tokens.ids[tokens.action_mask][:num_old].tolist()
        assert before == whole.ids[whole.action_mask][:num_old].tolist()
        assert [i for i, action in enumerate(actions) if not action] == ([n] if sample.thought_cut else [])
        assert D in response[: n + 1] or (EOS in response[:n] and len(response) <= n)
        num_crossed += sample.thought_cut and 0 < num_old < len(versions)
    assert num_crossed >= 16


@pytest.mark.parametrize("mode", MODES)
def test_a_thought_goes_on_in_another_engine_with_its_budget(stage, folders, tmp_path, mode):
    use(stage, folders[0], mode, 6)
    stage.push(folders[0], 500 + MODES.index(mode))
    prompts = asked(8, n=10)

    def answer(earlier=()) -> list[tuple]:
        async def all_of_them():
            calls = (stage.engine.answer(i, i, prompt, range(4), earlier) for i, prompt in enumerate(prompts))
            return await asyncio.gather(*calls)

        return [
            (t.ids.tolist(), t.action_mask.tolist(), s.finish, s.thought_cut) for s, t in flat(stage.run(all_of_them()))
        ]

    whole = answer()
    rows = []
    for i, (ids, actions, *_) in enumerate(whole):
        # vLLM emits the closing itself if it keeps the budget
        emitted = [token for token, action in zip(ids[4:], actions[4:]) if action or mode == "native"]
        name = i // 4 * MAX_SAMPLES + i % 4
        rows += [(name, token, 1, -1.0) for token in emitted[: i % 14]]
    np.array(rows, ROW).tofile(tmp_path / "lost.tokens")
    assert sum(a == b for a, b in zip(answer([tmp_path / "lost.tokens"]), whole, strict=True)) >= 31


def test_each_answer_has_the_budget_that_it_was_asked_with(stage, folders):
    for mode in MODES:
        use(stage, folders[0], mode, 6)
        prompt = Prompt("row", (5, 6, O, 9), "", {"n": 40}, thought_budgets=(1, 2, 30, 3))
        [group] = stage.run(stage.engine.generate([prompt], 4, stage.engine.weights.version, seed=3))
        assert [sample.thought_budget for sample, _ in group] == [1, 2, 30, 3]
        assert all(sample.num_thought_tokens <= sample.thought_budget for sample, _ in group)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_has_closed_its_thought_has_no_budget(stage, folders, mode):
    use(stage, folders[0], mode, 6)
    prompts = [Prompt("a", (5, O, D), "", {"n": 3}), Prompt("b", (5, O, D, 19, 19), "", {"n": 3})]  # 19 is a space
    groups = stage.run(stage.engine.generate(prompts, 8, stage.engine.weights.version, seed=3))
    for sample, tokens in flat(groups):
        assert tokens.action_mask[sample.num_prompt_tokens :].all() and not sample.thought_cut
        assert (sample.thought_budget, sample.num_thought_tokens) == (None, 0)
        assert sample.length - sample.num_prompt_tokens <= 6


def test_vllms_budget_needs_a_prompt_that_opens_the_thought(stage, folders):
    use(stage, folders[0], "native")
    for ids in ((5, 6), (5, O, D, 6)):
        with pytest.raises(ValueError, match="prompt row does not open a thought with '<think>'"):
            stage.run(stage.engine.generate([Prompt("row", ids, "", {"n": 3})], 1, stage.engine.weights.version, 0))


def test_a_row_with_a_wrong_budget_is_refused(stage, folders):
    use(stage, folders[0], "two_call")
    for columns in ({}, {"n": -1}, {"n": 41}, {"n": 3.0}, {"n": True}):
        with pytest.raises(ValueError, match="prompt row: column `n` has .* needs an integer from 0 to 40"):
            stage.run(stage.engine.generate([Prompt("row", (5,), "", columns)], 1, stage.engine.weights.version, 0))
    given = Prompt("row", (5,), "", {"n": 3}, thought_budgets=(41,))
    with pytest.raises(ValueError, match="has a budget of 41 thought tokens, not one of 0 to 40"):
        stage.run(stage.engine.generate([given], 1, stage.engine.weights.version, 0))
