"""The budgets of thoughts that the driver chooses, by hand, through the loop, and through a resume."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_ports import PROMPTS, StopAfter, World, config, run

from megatron_rl.loop.budgets import ThoughtBudgets
from megatron_rl.loop.rollouts import describe, describe_thoughts
from megatron_rl.types import Group, Prompt, Rollout, Verdict

PROMPT = Prompt("row 3", (5, 6), "", {"n": 7})
ROLLOUT = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_response_tokens": 64}
QUANTILE = {"kind": "quantile", "quantile": 0.5, "low": 4, "high": 12, "start": 10, "num_steps": 2}


def thinking(tokens, **rollout):
    section = {"thought_tokens": tokens, "response_tokens": 4}
    return config(
        rollout=ROLLOUT | {"thinking": section} | rollout,
        balance={"max_tokens_per_microbatch": 128},
        run={"name": "x", "steps": 6},
    )


def given_budgets(tokens, number=0, step=0) -> tuple[int, ...]:
    return ThoughtBudgets(thinking(tokens)).give(PROMPT, number, step).thought_budgets


def test_the_configurations_number_and_the_rows_own_need_not_travel():
    for tokens in (20, {"kind": "column", "name": "n", "high": 20}):
        cfg = thinking(tokens)
        assert ThoughtBudgets(cfg).give(PROMPT, 3, 5) == PROMPT
        assert cfg.rollout.thinking.of_row(PROMPT.columns) == (20 if tokens == 20 else 7)
    assert thinking(QUANTILE).rollout.thinking.of_row({}) == 12
    assert ThoughtBudgets(config()).give(PROMPT, 3, 5) == PROMPT


@pytest.mark.parametrize(("step", "budget"), [(0, 40), (99, 40), (100, 28), (149, 28), (150, 50), (10**6, 50)])
def test_a_schedule_has_steps(step, budget):
    assert given_budgets({"kind": "schedule", "tokens": {100: 28, 0: 40, 150: 50}}, step=step) == (budget,) * 2


@settings(max_examples=30)
@given(st.integers(0, 40), st.integers(0, 15), st.integers(0, 10**6))
def test_drawn_budgets_are_a_function_of_the_prompts_number(low, width, number):
    each = {"kind": "uniform", "low": low, "high": low + width}
    drawn = given_budgets(each, number)
    assert drawn == given_budgets(each, number, step=9) and all(low <= one <= low + width for one in drawn)
    first, second = given_budgets(each | {"per": "prompt"}, number)
    assert first == second == drawn[0]


def test_drawn_budgets_have_all_values_alike():
    tokens = {"kind": "uniform", "low": 3, "high": 6}
    budgets = ThoughtBudgets(thinking(tokens))
    drawn = [one for number in range(1000) for one in budgets.give(PROMPT, number, 0).thought_budgets]
    counts = np.bincount(drawn, minlength=7)
    assert counts.sum() == 2000 and (abs(counts[3:] - 500) < 5 * np.sqrt(500)).all() and not counts[:3].any()


def answered(*thoughts: tuple[int, bool, float | None], budget: int = 10) -> Group:
    """The length of each thought, whether the budget ended it, and the score."""
    samples = [
        Rollout(30, 2, num, num, "stop", thought_cut=cut, thought_budget=budget, verdict=Verdict(score, parts=(score,)))
        for num, cut, score in thoughts
    ]
    return Group(PROMPT, samples, None, 0)


def test_the_quantile_is_that_of_whole_thoughts_with_right_answers():
    budgets = ThoughtBudgets(thinking(QUANTILE))

    def now():
        return budgets.give(PROMPT, 0, 0).thought_budgets[0]

    assert now() == 10, "the start"
    budgets.record([answered((9, True, 1.0), (9, False, 0.0), (9, False, None), (0, False, 1.0))])
    assert now() == 10, "no thought counts: cut, wrong, without a score, without a thought"
    budgets.record([answered((5, False, 1.0)), answered((7, False, 1.0), (11, False, 1.0))])
    assert now() == 7, "half of 5, 7 and 11 are at most 7"
    budgets.record([answered((2, False, 1.0), (3, False, 1.0), (3, False, 1.0), (3, False, 1.0))])
    assert now() == 4, "of 2 3 3 3 5 7 11 the fourth, 3, which is below low"
    budgets.record([answered((30, False, 1.0))] * 9)
    assert now() == 12, "the step with 5, 7 and 11 is forgotten; 30 is above high"
    restored = ThoughtBudgets(thinking(QUANTILE))
    restored.restore(json.loads(json.dumps(budgets.state())))
    assert restored.give(PROMPT, 0, 0) == budgets.give(PROMPT, 0, 0)


class Thinkers(World):
    """The thoughts' lengths depend on row and version. Notes which budgets each asking has."""

    def __init__(self):
        super().__init__()
        self.budgets: dict[tuple, list[tuple[int, ...]]] = {}

    def groups(self, prompts, num_samples, version):
        groups = super().groups(prompts, num_samples, version)
        for group in groups:
            self.budgets.setdefault((group.prompt.uid, version), []).append(group.prompt.thought_budgets)
        return [
            replace(group, rollouts=[self.thought(group, i, version) for i in range(num_samples)]) for group in groups
        ]

    def thought(self, group, i, version):
        length = 4 + (2 * version + int(group.prompt.uid[4:]) % 3) % 9
        budget = group.prompt.thought_budgets[i]
        return replace(group.rollouts[i], thought_budget=budget, num_thought_tokens=length)


def test_a_resumed_run_has_the_budgets_of_an_uninterrupted_one(tmp_path):
    whole, cfg = Thinkers(), thinking(QUANTILE)
    run(whole, tmp_path / "whole", cfg)
    parts = Thinkers()
    run(parts, tmp_path / "parts", cfg, stopping=StopAfter(parts, 3))
    first_half = dict(parts.budgets)
    run(parts, tmp_path / "parts", cfg, resume="auto")
    assert parts.budgets == whole.budgets and len(first_half) < len(whole.budgets)
    assert len({budgets for asked in whole.budgets.values() for budgets in asked}) > 2, "they follow the thoughts"


def test_a_group_under_way_is_asked_again_with_its_budgets(tmp_path):
    class Numbered(Thinkers):
        def ask(self, requests, version):
            for request in requests:
                self.given.setdefault(request.number, []).append((version, request.prompt.thought_budgets))
            super().ask(requests, version)

    world, cfg = Numbered(), thinking(QUANTILE, max_lag=2)
    world.given = {}
    run(world, tmp_path / "c", cfg, stopping=StopAfter(world, 3), train_on=PROMPTS)
    run(world, tmp_path / "c", cfg, resume="auto", train_on=PROMPTS)
    again = [asked for asked in world.given.values() if len(asked) > 1]
    assert again and all(budgets == asked[0][1] for asked in again for _, budgets in asked)
    now = {budgets for asked in world.given.values() for version, budgets in asked if version >= 3 and len(asked) == 1}
    assert any(asked[0][1] not in now for asked in again), "new groups have other budgets by then"


def test_the_metrics_of_a_budget():
    groups = [answered((10, True, 0.0), (4, False, 1.0), (11, True, None)), answered((3, False, 0.5), budget=20)]
    assert describe_thoughts(groups) == {
        "thought/budget_mean": 12.5,
        "thought/over_budget": 1.0,
        "thought/cut_reward_mean": 0.0,
        "thought/whole_reward_mean": 0.75,
    }
    lengths = describe(groups)
    assert lengths["length/thought_mean"] == 7.0 and lengths["length/thought_cut"] == 0.5
    first, second, third = groups[0].rollouts
    groups[0] = replace(groups[0], rollouts=[first, replace(second, num_actions=12), third])
    assert describe(groups)["length/answer_mean"] == 2.0
    without = [replace(g, rollouts=[replace(one, thought_budget=None) for one in g.rollouts]) for g in groups]
    assert describe_thoughts(without) == {}
