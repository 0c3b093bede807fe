"""The thinking budget on the real engine, with a delimiter of two tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_references import reference_logp
from transformers import AutoModelForCausalLM

from megatron_rl.config.policy import ModelConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.rollout.program import find_delimiter
from megatron_rl.types import Mesh, Prompt

DELIMITER = (16, 18)
"""The tokens of `=?`."""
TEMPERATURE = 2.0
BUDGET = {"delimiter": "=?", "thinking": {"thought_tokens": 10, "response_tokens": 6}}


@pytest.fixture(scope="module")
def stage(make_stage, folders):
    """The temperature is high, so that the two tokens of the delimiter sometimes follow each other."""
    budget = {"max_prompt_tokens": 8, "max_response_tokens": 18, **BUDGET}
    stage = make_stage(folders[0], Mesh(), **budget, sampling={"temperature": TEMPERATURE})
    stage.push(folders[0], 0)
    return stage


def test_budgets_hold_and_forced_tokens_are_no_actions(stage, folders):
    prompts = [Prompt(str(i), (5 + i, 6, 15), "") for i in range(8)]
    groups = stage.run(stage.engine.generate(prompts, 256, 0, seed=1))
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    seen = set()
    for sample, tokens in (answer for group in groups for answer in group):
        response, action = tokens.ids[3:].tolist(), tokens.action_mask[3:]
        start = find_delimiter(response, DELIMITER)
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


def test_same_seed_same_answers(stage):
    prompts = [Prompt("a", (5, 6, 7), ""), Prompt("b", (8, 9), "")]
    first, second = (stage.run(stage.engine.generate(prompts, 16, 0, seed=5)) for _ in range(2))
    for (_, a), (_, b) in zip(sum(first, []), sum(second, []), strict=True):
        assert a.ids.tolist() == b.ids.tolist() and a.logp_rollout.tolist() == b.logp_rollout.tolist()


def engine(folder, **rollout) -> VllmEngine:
    config = RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_prompt_tokens=8, **rollout)
    return VllmEngine(model=ModelConfig(path=folder, dtype="float32"), rollout=config, seed=0)


def test_a_delimiter_without_room_is_refused(folders):
    with pytest.raises(ValueError, match="the closing's 2 tokens .* 18; raise it"):
        engine(folders[0], max_response_tokens=17, **BUDGET)


def test_more_tokens_than_positions_are_refused(folders):
    with pytest.raises(ValueError, match="= 257 exceeds the 256 positions"):
        engine(folders[0], max_response_tokens=249)
