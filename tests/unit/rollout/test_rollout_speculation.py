"""Drafts and their verification: the pure rules against slow references, and an engine of vLLM that has drafts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tiny_references import reference_logp
from transformers import AutoModelForCausalLM

from megatron_rl.rollout import drafts as drafting
from megatron_rl.rollout.coupling import accept
from megatron_rl.rollout.drafts import SIZE, DraftedAnswer, DraftedGroup, Texts, copied, depth, draft_metrics
from megatron_rl.rollout.program import Call, Request
from megatron_rl.rollout.progress import recorded
from megatron_rl.types import Mesh, Prompt

CLOSES, FORBIDDEN = 3, 4
THOUGHT, ANSWER = 60, 90


def taken_one_by_one(draws: list[int], drafts: list[int], num_drafts: list[int]) -> list[int]:
    """As `accept`: each request walks along its drafts until one is wrong."""
    taken = []
    for number in num_drafts:
        own, draws = draws[: number + 1], draws[number + 1 :]
        guesses, drafts = drafts[:number], drafts[number:]
        count = 1
        while count <= number and guesses[count - 1] == own[count - 1]:
            count += 1
        taken.append(count)
    return taken


def test_what_is_taken_is_what_a_walk_along_the_drafts_takes():
    random = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        num_drafts = random.integers(0, 5, random.integers(1, 7))
        drafts = random.integers(0, 2, num_drafts.sum())
        draws = random.integers(0, 2, num_drafts.sum() + len(num_drafts))
        found = accept(draws, drafts, num_drafts).tolist()
        assert found == taken_one_by_one(draws.tolist(), drafts.tolist(), num_drafts.tolist())
        seen |= set(zip(num_drafts.tolist(), found, strict=True))
    assert {(0, 1), (4, 1), (4, 3), (4, 5)} <= seen


def next_by_search(texts: list[list[int]], own: int, order: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The text and the place of the newest token that follows the run of SIZE tokens with which text `own` ends.

    Args:
        order: the text and the place of each token, in the order in which they were learned.
    """
    run = texts[own][-SIZE:]
    return next(
        (one for one in reversed(order) if one[1] >= SIZE and texts[one[0]][one[1] - SIZE : one[1]] == run), None
    )


def test_drafts_are_what_a_search_of_the_texts_finds():
    random = np.random.default_rng(1)
    num_found = 0
    for _ in range(100):
        texts, shared = [[], []], Texts()
        answers, order = [DraftedAnswer(text) for text in texts], []
        for _ in range(30):
            which = int(random.integers(2))
            new = random.integers(0, 3, random.integers(1, 4)).tolist()
            order += [(which, len(texts[which]) + i) for i in range(len(new))]
            texts[which] += new
            answers[which].read(shared)
            found = next_by_search(texts, which, order) if len(texts[which]) >= SIZE else None
            most = int(random.integers(1, 6))
            expected: list[int] = []
            if found is not None:
                source, start = texts[found[0]], found[1]
                for i in range(start, start + most):  # a text that is copied to its end goes on with its drafts
                    whole = source + expected if found[0] == which else source
                    expected += whole[i : i + 1]
            assert answers[which].draft(most) == expected
            num_found += found is not None
    assert num_found > 1000


def test_golden_drafts():
    text = [7, 8, 9, 8]
    assert copied(text, 2, text, 5) == [9, 8, 9, 8, 9]
    assert copied([1, 2, 3], 1, text, 5) == [2, 3]
    assert DraftedAnswer([4, 5]).draft(3) == []


@pytest.mark.parametrize(
    ("rate", "running", "most", "drafts"),
    [
        (0.5, 1, 8, 3),
        (0.0, 1, 8, 0),
        (1.0, 32, 8, 8),
        (0.5, 14, 8, 0),
        (0.51, 14, 8, 1),
        (0.9, 7, 8, 8),
        (0.9, 7, 30, 10),
    ],
)
def test_an_answer_gets_drafts_while_they_are_likelier_than_the_share_of_a_token(rate, running, most, drafts):
    assert depth(rate, running, most) == drafts


def test_the_rate_follows_what_the_lookup_would_have_found():
    answer, texts = DraftedAnswer([]), Texts()
    answer.text += [1, 2, 3] * 20
    answer.read(texts)
    assert answer.rate > 0.99
    for token in range(10, 40):  # each is new
        answer.text.append(token)
        answer.read(texts)
    assert answer.rate > 0.8, "no lookup found anything, so none was wrong"
    for _ in range(20):
        answer.text += [1, 2, int(np.random.default_rng(len(answer.text)).integers(100, 10**6))]
        answer.read(texts)
    assert answer.rate < 0.6


def test_a_group_reads_shared_tokens_once_and_learns_from_all_its_answers():
    group = DraftedGroup()
    first, second = [1, 2, 3, 4], [1, 2, 3, 4]
    one = group.begin(0, first)
    first += [7, 8, 9]
    group.read()
    other = group.begin(1, second)
    assert other.num_read == 4
    second += [7, 8]
    group.read()
    assert other.draft(1) == [9], "the other answer went on with it"
    going_on = [*second, 5, 6]  # forced tokens follow, and another call
    assert group.begin(1, going_on).num_read == 6
    assert group.begin(1, [9, 9, 9]).num_read == 0, "its history was rewritten"
    assert one.num_read == 7


def test_the_metrics_of_a_step_are_those_of_all_engines():
    counts = [
        {"drafted": 6.0, "drafted/depth_1": 4.0, "drafted/depth_2": 2.0, "accepted": 3.0, "accepted/depth_1": 3.0},
        {"drafted": 4.0, "drafted/depth_1": 4.0, "accepted": 1.0, "accepted/depth_1": 1.0},
    ]
    engines = [one | {"sampled": 20.0, "preempted": 1.0, "paused_s": 0.5} for one in counts]
    assert draft_metrics(engines) == {
        "rollout/drafted": 10.0,
        "rollout/accepted": 4.0,
        "rollout/accepted/share": 0.1,
        "rollout/accepted/depth_1": 0.5,
        "rollout/accepted/depth_2": 0.0,
    }
    assert draft_metrics([{"preempted": 1.0}]) == {}
    assert draft_metrics([{"sampled": 0.0}])["rollout/accepted/share"] == 0


@pytest.fixture(scope="module")
def stage(make_stage, folders, tmp_path_factory):
    return make_stage(
        folders[0],
        Mesh(),
        record=tmp_path_factory.mktemp("record") / "answers.tokens",
        max_prompt_tokens=80,
        max_response_tokens=THOUGHT + ANSWER + 1,
        sampling={"temperature": 0.3, "forbid": ["<unk>"]},
        thinking={"thought_tokens": THOUGHT, "response_tokens": ANSWER},
        speculative={"tokens": 6},
    )


def columns(groups) -> list[tuple[list[int], list[bool], list[int]]]:
    return [
        (tokens.ids.tolist(), tokens.action_mask.tolist(), tokens.version.tolist())
        for group in groups
        for _, tokens in group
    ]


@pytest.mark.deep
def test_an_engine_samples_the_same_with_and_without_drafts(stage, folders, monkeypatch):
    """With a thinking budget, forced and forbidden tokens, after a push, and on from the record of another engine."""
    version, sampler = stage.load(folders[0]), stage.engine.sampler
    prompts = [Prompt(f"row {i}", (5 + i, 6, 7 + i, 5 + i, 6, 16), "") for i in range(4)]
    drafted = stage.run(stage.generate(prompts, 4, version, seed=3))
    counts = sampler.drafts.take_counts()
    assert counts["accepted"] > 60 and counts["drafted/depth_4"] > 0 and counts["accepted"] < counts["drafted"]
    assert counts["accepted"] == sum(n for name, n in counts.items() if name.startswith("accepted/running_"))
    monkeypatch.setattr(drafting, "MOST_RUNNING", 0)
    plain = stage.run(stage.generate(prompts, 4, version, seed=3))
    assert not sampler.drafts.take_counts()
    assert columns(drafted) == columns(plain)
    assert len(sampler.drafts._answers) < 16, "answers that have ended are forgotten in steps without drafts, too"
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    forced = 0
    for group, others in zip(drafted, plain, strict=True):
        for (sample, tokens), (_, other) in zip(group, others, strict=True):
            # Steps of other sizes may round differently.
            assert np.allclose(tokens.logp_rollout, other.logp_rollout, atol=1e-5)
            expected = reference_logp(model, tokens.ids, 0.3, [FORBIDDEN])
            assert abs(expected - tokens.logp_rollout)[tokens.action_mask].max() < 1e-4
            forced += sample.thought_cut
            assert FORBIDDEN not in tokens.ids[tokens.action_mask]
    assert forced
    monkeypatch.undo()

    whole = stage.run(stage.answer(8, 1, prompts[0], range(8)))
    longest = max(range(8), key=lambda sample: len(whole[sample][1].ids))

    async def cut_and_go_on(ticket: int):
        """Another engine would read the record of this one, whose group ends in the middle."""
        begun = asyncio.create_task(stage.answer(ticket, 1, prompts[0], range(8)))
        while len(recorded([sampler.spec.record], ticket, longest)) < 20:
            assert not begun.done()
            await asyncio.sleep(0)
        await stage.engine.cancel(ticket)
        with pytest.raises(RuntimeError, match="cancelled"):
            await begun
        rows = recorded([sampler.spec.record], ticket, longest)
        return rows, await stage.answer(ticket, 1, prompts[0], range(8), [sampler.spec.record])

    rows, resumed = stage.run(cut_and_go_on(7))
    assert columns([resumed]) == columns([whole])
    own = resumed[longest][1]
    assert own.ids[own.action_mask][: len(rows)].tolist() == rows["token"].tolist()


@pytest.mark.deep
def test_drafted_tokens_have_the_models_probabilities(stage, folders, monkeypatch):
    """A chi-square test of the second token, which every prompt drafts: it has each token behind its last one."""
    monkeypatch.setattr(drafting, "MOST_RUNNING", 10**6)
    monkeypatch.setattr(drafting, "depth", lambda rate, running, most: most)
    monkeypatch.setattr(drafting, "SMALLEST_GAIN", -1.0)
    stage.load(folders[0])
    sampler, num = stage.engine.sampler, 3000
    prompt = [part for token in range(5, 21) for part in (16, token, 8 + token % 5)] + [16]

    async def answers():
        requests = [Request(prompt, Call(3), seed, answer=(9, seed)) for seed in range(num)]
        futures = await sampler.call(lambda: sampler.ask(requests))
        return [(await asyncio.wrap_future(future)).ids for future in futures]

    found = stage.run(answers())
    sampler.drafts.forget(9)
    counts = sampler.drafts.take_counts()
    assert counts["drafted/depth_1"] > 0.7 * num and 0.02 < counts["accepted"] / counts["drafted"] < 0.98
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    firsts = np.bincount([one[0] for one in found if len(one) > 1])
    likeliest = int(firsts.argmax())
    seconds = np.bincount([one[1] for one in found if len(one) > 1 and one[0] == likeliest], minlength=40)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, likeliest]])).logits[0, -1].double() / 0.3
    logits[[FORBIDDEN, *range(20, 40)]] = -torch.inf
    expected = logits.softmax(-1).numpy() * seconds.sum()
    often = expected > 5
    assert seconds.sum() > 500 and often.sum() > 1
    pairs = [*zip(seconds[often], expected[often], strict=True), (seconds[~often].sum(), expected[~often].sum())]
    chi_square = sum((seen - due) ** 2 / max(due, 1.0) for seen, due in pairs)
    # By chance one time in 1e6 with up to 8 degrees of freedom.
    assert len(pairs) <= 9 and chi_square < 43
