"""Values of prefixes on the real engine, against transformers."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tiny_references import reference_logp
from transformers import AutoModelForCausalLM

from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.rollout.programs.prefix_values import PrefixValuer
from megatron_rl.types import UTILITY, Branch, Mesh, Prompt

THINKS, CLOSES = 2, 3
TEMPERATURE = 1.5


@pytest.fixture(scope="module")
def valuing(make_stage, folders):
    return make_stage(
        folders[0],
        Mesh(),
        thinking={"thought_tokens": 40, "response_tokens": 4},
        prefix_values={"force": "</think>", "markers": ["+"], "min_tokens": 4, "max_tokens": 12, "floor": -1000.0},
        max_prompt_tokens=20,
        max_response_tokens=64,
        sampling={"temperature": TEMPERATURE},
    )


@pytest.fixture
def stage(valuing, folders):
    valuing.push(folders[0], 0)
    return valuing


@pytest.fixture(scope="module")
def models(folders):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]


def prompts(count: int, truth="42") -> list[Prompt]:
    return [Prompt(f"row {i}", (5 + i, *range(6, 20), THINKS), "", {"ground_truth": truth}) for i in range(count)]


def value(model, prefix, forced) -> float:
    """The mean log-prob of the tokens after `</think>`, at temperature 1."""
    ids = torch.tensor([*prefix, *forced]).numpy()
    return float(reference_logp(model, ids, 1.0)[-(len(forced) - 1) :].mean())


def check(model, prompt: Prompt, sample, tokens, forced) -> int:
    """Returns the number of passages."""
    ids = tokens.ids.tolist()
    given = [reward for reward in sample.token_rewards if reward.kind == UTILITY]
    ends = [reward.position + 1 for reward in given]
    thought_ends = ids.index(CLOSES) if CLOSES in ids else len(ids)
    assert (ends[-1] if ends else len(prompt.token_ids)) == thought_ends
    values = [value(model, ids[:end], forced) for end in (len(prompt.token_ids), *ends)]
    changes = [after - before for before, after in zip(values, values[1:], strict=False)]
    # Both sides compute two layers in fp32 and round logits at 1e-6 relative.
    assert [reward.value for reward in given] == pytest.approx(changes, abs=1e-5)
    return len(given)


def forced_ids(stage, text: str) -> list[int]:
    [wanted] = stage.engine._valuer.wanted(prompts(1, text)[0])
    return [*wanted.before, *wanted.ids]


def test_values_are_those_of_a_forward_pass(stage, models):
    forced = forced_ids(stage, "42")
    assert forced[0] == CLOSES and len(forced) == 3
    asked = prompts(4)
    groups = stage.run(stage.generate(asked, 6, 0, seed=1))
    num = sum(
        check(models[0], prompt, sample, tokens, forced)
        for prompt, group in zip(asked, groups, strict=True)
        for sample, tokens in group
    )
    assert num > 24, f"only {num} passages"
    noted = stage.engine.sampler._thread.requests._budget._bins
    assert len(noted) <= 2 * 24, "only the answers' own calls, one or two each, say how long answers are"
    # Without anything in the cache the same values are found.
    again = stage.run(stage.generate(asked, 6, 0, seed=1))
    for (one, _), (other, _) in zip(sum(groups, []), sum(again, []), strict=True):
        assert one.token_rewards == other.token_rewards


def test_what_is_scored_may_lie_in_the_cache(stage, models):
    """A block of the cache has 32 tokens. Tokens that were found in it have no log-probs, so they are asked again."""
    ids = [5 + (i * i) % 13 for i in range(131)]
    expected = reference_logp(models[0], torch.tensor(ids).numpy(), 1.0)

    def num_requests(num: int) -> int:
        before = stage.engine.sampler._num_requests
        [scored] = stage.run(stage.engine._carry_out(stage.engine._score([(ids, num)])))
        # Both sides compute two layers in fp32 and round logits at 1e-6 relative.
        assert list(scored) == pytest.approx(expected[-num:].tolist(), abs=1e-5)
        return stage.engine.sampler._num_requests - before

    assert [num_requests(num) for num in (5, 5, 2, 3)] == [1, 2, 1, 2]


@pytest.mark.deep
def test_texts_that_do_not_fit_into_one_step_are_scored_in_parts(stage, models):
    """A step has at most 8192 tokens, so some text of these 12,000 is computed in two of them."""
    texts = [([5 + (i * i + i * k) % 13 for i in range(200)], 1 + k % 7) for k in range(60)]
    for (ids, num), scored in zip(texts, stage.run(stage.engine._carry_out(stage.engine._score(texts))), strict=True):
        expected = reference_logp(models[0], torch.tensor(ids).numpy(), 1.0)[-num:]
        # Both sides compute two layers in fp32 and round logits at 1e-6 relative.
        assert list(scored) == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_row_without_an_answer_has_no_rewards(stage):
    [group] = stage.run(stage.generate(prompts(1, None), 2, 0, seed=1))
    assert all(not sample.token_rewards for sample, _ in group)


def test_answers_that_are_not_trained_on_have_no_rewards(stage):
    async def answers():
        [of_call] = await stage.generate(prompts(1), 2, 0, seed=1, purpose="evaluation")
        return [*of_call, *await stage.answer(9, -1, prompts(1)[0], range(2))]

    assert all(not sample.token_rewards for sample, _ in stage.run(answers()))


@pytest.mark.deep
def test_answers_that_go_on_alone_have_values_too(stage, models, folders):
    """The values are those of the weights that the engine holds when an answer is complete."""

    async def answers():
        prompt = prompts(1)[0]
        one = await stage.answer(0, 3, prompt, range(4))
        two = await asyncio.gather(*(stage.answer(1 + i, 4 + i, prompt, range(2)) for i in range(2)))
        return prompt, [*one, *two[0], *two[1]]

    prompt, found = stage.run(answers())
    for sample, tokens in found:
        check(models[0], prompt, sample, tokens, forced_ids(stage, "42"))
    stage.push(folders[1], 1)
    prompt, found = stage.run(answers())
    for sample, tokens in found:
        check(models[1], prompt, sample, tokens, forced_ids(stage, "42"))


@pytest.fixture
def branching(stage, folders, monkeypatch) -> int:
    """The engine goes on from each passage, instead of scoring the right answer. Returns the number of rollouts."""
    engine, cfg = stage.engine, PrefixValues(rollouts=3, markers=("+",), min_tokens=4, max_tokens=12)
    monkeypatch.setattr(engine, "_valuer", PrefixValuer(folders[0], cfg, (CLOSES,), engine._score, engine._go_on))
    return 3


def check_branches(model, prompt: Prompt, group, rollouts: int) -> int:
    """Returns the number of branches."""
    answers = [one for one in group if one[0].branch is None]
    branches = group[len(answers) :]
    passages = [[reward.position + 1 for reward in sample.token_rewards] for sample, _ in answers]
    expected = [Branch(i, k) for i, own in enumerate(passages) for k in range(len(own)) for _ in range(rollouts)]
    assert [sample.branch for sample, _ in branches] == expected
    for sample, tokens in branches:
        end, start = passages[sample.branch.sample][sample.branch.passage], len(prompt.token_ids)
        ids = tokens.ids.tolist()
        assert ids[:end] == answers[sample.branch.sample][1].ids[:end].tolist()
        # Its thought has what is left of the budget of 40 tokens, and its answer has 4.
        assert sample.num_thought_tokens <= 40 and len(ids) <= start + 40 + 1 + 4
        closes = start + 40
        assert CLOSES in ids[start : closes + 1] or sample.finish == "stop"
        assert tokens.action_mask[start:].sum() == len(ids) - start - (ids[closes : closes + 1] == [CLOSES])
        expected = reference_logp(model, tokens.ids, TEMPERATURE)
        # Both sides compute two layers in fp32 and round logits at 1e-6 relative.
        assert abs(expected - tokens.logp_rollout)[tokens.action_mask].max() < 1e-5
    return len(branches)


@pytest.mark.deep
def test_other_answers_go_on_from_each_passage(stage, folders, models, branching):
    stage.push(folders[1], 1)
    asked = prompts(3, None)
    groups = stage.run(stage.generate(asked, 4, 1, seed=1))
    num = sum(check_branches(models[1], *one, branching) for one in zip(asked, groups, strict=True))
    assert num > 36, f"only {num} samples go on"
    of_branch = {}
    for sample, tokens in groups[0]:
        if sample.branch is not None:
            of_branch.setdefault(sample.branch, set()).add(tuple(tokens.ids.tolist()))
    assert max(map(len, of_branch.values())) == branching, "each has its own seed"
    again = stage.run(stage.generate(asked, 4, 1, seed=1))
    for (_, one), (_, other) in zip(sum(groups, []), sum(again, []), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
    [alone] = asked[:1]
    group = stage.run(stage.answer(20, 7, alone, range(3)))
    assert check_branches(models[1], alone, group, branching)
    [evaluated] = stage.run(stage.generate(asked[:1], 2, 1, seed=1, purpose="evaluation"))
    assert len(evaluated) == 2
