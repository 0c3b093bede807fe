"""The table of the thinking budget on vLLM, whose model is made to want chosen tokens, and vLLM's own budget."""

from __future__ import annotations

import pytest
from budget_cases import CASES, MODES, O, check

from megatron_rl.rollout.budgets import Budgets
from megatron_rl.types import Mesh, Prompt

LARGEST, ANSWER = 12, 8
THOUGHT = {"kind": "column", "name": "n", "high": LARGEST}
ROLLOUT = {"max_prompt_tokens": 8, "max_response_tokens": 24}


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
