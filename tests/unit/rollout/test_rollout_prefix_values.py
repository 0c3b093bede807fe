"""Values of prefixes and utilities of passages, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_rl.algorithms.utilities import together, utilities
from megatron_rl.config.prefix_values import PrefixValues
from megatron_rl.rollout.coroutine import begin
from megatron_rl.rollout.programs.prefix_values import PrefixValuer
from megatron_rl.types import FROM_PROMPT, UTILITY, Branch, Episode, Prompt, Rollout, TokenReward, Tokens

WORDS = ["<unk>", "</think>", "The", "answer", "is", "4", "2", "So", "it", "hm", "."]
CLOSE, FOUR, TWO = (WORDS.index(word) for word in ("</think>", "4", "2"))
FORCE = [WORDS.index(word) for word in ("</think>", "The", "answer", "is")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokens are words and digits."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Model:
    """Its log-prob of a token is minus the token's id, divided by the number of tokens before it. An answer that goes
    on has one more token, the number of the rollout."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []

    def score(self, texts):
        yield []
        self.asked += texts
        return [[-ids[i] / i for i in range(len(ids) - num, len(ids))] for ids, num in texts]

    def go_on(self, prompt, beginnings):
        yield []
        answers = []
        for one in beginnings:
            ids = np.append(one.tokens.ids[: one.length], one.rollout).astype(np.int32)
            mask = np.arange(len(ids)) >= len(prompt.token_ids)
            tokens = Tokens(ids, mask, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))
            answers.append((Rollout(len(ids), len(prompt.token_ids), mask.sum(), 0, "stop"), tokens))
        return answers


def valuer(folder, model=None, **keys) -> PrefixValuer:
    model, given = model or Model(), {"markers": ("So ",), "min_tokens": 1, "max_tokens": 9}
    given |= {} if "rollouts" in keys else {"force": "</think> The answer is "}
    return PrefixValuer(folder, PrefixValues(**(given | keys)), (CLOSE,), model.score, model.go_on)


def prompt(truth) -> Prompt:
    return Prompt("row", (9, 9), "", {"ground_truth": truth})


def answer(*words: str) -> tuple[Rollout, Tokens]:
    ids = np.array([9, 9, *map(WORDS.index, words)], np.int32)
    mask = np.arange(len(ids)) >= 2
    tokens = Tokens(ids, mask, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))
    return Rollout(len(ids), 2, len(words), 0, "stop"), tokens


def rewards(held: PrefixValuer, truth, given) -> tuple[TokenReward, ...]:
    [(sample, _)], _ = begin(held.rewarded(prompt(truth), [given])).result()
    return sample.token_rewards


def test_golden_values_and_utilities(folder):
    """The thought "hm . So it ." has the passages "hm ." and "So it ."; the right answer 42 is two tokens."""
    model = Model()
    given = answer("hm", ".", "So", "it", ".", "</think>", "4")
    found = rewards(valuer(folder, model), "42", given)
    #         prompt 2, force 4: the first token of the answer has 6 tokens before it, the second one 7
    expected = [-(FOUR / (n + 6) + TWO / (n + 7)) / 2 for n in (0, 2, 5)]
    assert [(r.position, r.kind) for r in found] == [(3, UTILITY), (6, UTILITY)]
    assert [r.value for r in found] == pytest.approx([expected[1] - expected[0], expected[2] - expected[1]], rel=1e-12)
    assert model.asked[0] == ((9, 9, *FORCE, FOUR, TWO), 2)
    assert model.asked[2] == ((9, 9, *map(WORDS.index, ("hm", ".", "So", "it", ".")), *FORCE, FOUR, TWO), 2)
    assert len(model.asked) == 3


def test_the_value_may_be_the_probability_of_the_whole_answer(folder):
    """The log-probs of 42 are added up, and a right answer that is one of two has the probability of both."""
    given = answer("hm", "</think>")
    [reward] = rewards(valuer(folder, scale="probability"), "42", given)
    whole = [math.exp(-(FOUR / (n + 6) + TWO / (n + 7))) for n in (0, 1)]
    assert reward.value == pytest.approx(whole[1] - whole[0], rel=1e-12)
    [reward] = rewards(valuer(folder, scale="probability", several="logsumexp"), ["4", "2"], given)
    both = [math.exp(-FOUR / n) + math.exp(-TWO / n) for n in (6, 7)]
    assert reward.value == pytest.approx(both[1] - both[0], rel=1e-12)


def test_thoughts_that_begin_alike_are_asked_about_once(folder):
    model = Model()
    held = valuer(folder, model)
    given = [answer("hm", "So", *rest, "</think>") for rest in (["it"], ["it", "."], ["it"])]
    found, _ = begin(held.rewarded(prompt("4"), given)).result()
    assert len(model.asked) == len(set(model.asked)) == 4, "the prompt, `hm`, `hm So it` and `hm So it .`"
    one, longer, other = (sample.token_rewards for sample, _ in found)
    assert one == other and one[0] == longer[0] and one[1] != longer[1]


def test_several_right_answers(folder):
    means = [-FOUR / 6, -TWO / 6]
    given = answer("hm", "</think>")
    after = [-FOUR / 7, -TWO / 7]
    [largest] = rewards(valuer(folder), ["4", 2], given)
    assert largest.value == pytest.approx(max(after) - max(means), rel=1e-12)
    [summed] = rewards(valuer(folder, several="logsumexp"), ["4", 2], given)
    logsumexp = [math.log(sum(map(math.exp, each))) for each in (means, after)]
    assert summed.value == pytest.approx(logsumexp[1] - logsumexp[0], rel=1e-12)
    assert together([-1.0, -2.0], "logsumexp") == pytest.approx(-0.6867383124, rel=1e-9)
    assert together([-math.inf, -math.inf], "logsumexp") == -math.inf


def test_a_value_is_never_below_the_floor(folder):
    held = valuer(folder, floor=-0.8)
    values = begin(held.values([[], [9] * 50], held.wanted(prompt("4")))).result()
    assert values == [-0.8, pytest.approx(-FOUR / 54)]


def test_what_has_no_passage_or_no_answer_has_no_rewards(folder):
    model = Model()
    held = valuer(folder, model)
    assert rewards(held, "42", answer("</think>", "4")) == ()
    assert rewards(held, None, answer("hm", "</think>")) == ()
    assert rewards(held, [], answer("hm", "</think>")) == ()
    assert not model.asked


def test_a_thought_that_was_cut_has_passages_too(folder):
    assert [r.position for r in rewards(valuer(folder), 42, answer("hm", ".", "So", "it"))] == [3, 5]


def test_the_passages_of_an_episode_are_its_turns_with_their_observations(folder):
    """The model says "hm .", the environment "it 2", the model "So", the environment "2", and the model "4"."""
    sample, tokens = answer("hm", ".", "it", "2", "So", "2", "4")
    tokens = replace(tokens, action_mask=np.array([0, 0, 1, 1, 0, 0, 1, 0, 1], bool))
    sample = replace(sample, num_actions=4, episode=Episode(3, 8), token_rewards=(TokenReward(3, "environment", 0.5),))
    model = Model()
    turn, *found = rewards(valuer(folder, model), "4", (sample, tokens))
    assert turn == TokenReward(3, "environment", 0.5), "the environment's own reward stays"
    values = [-FOUR / (n + 6) for n in (0, 4, 6)]
    assert [r.position for r in found] == [5, 7]
    assert [r.value for r in found] == pytest.approx([values[1] - values[0], values[2] - values[1]], rel=1e-12)
    assert model.asked[1] == ((*tokens.ids[:6], *FORCE, FOUR), 1)


def test_what_was_forced_to_end_a_thought_is_not_a_part_of_it(folder):
    """With the closing text "So . </think>"."""
    sample, tokens = answer("hm", "it", "So", ".", "</think>", "4")
    tokens.action_mask[4:7] = False
    assert [r.position for r in rewards(valuer(folder), "4", (sample, tokens))] == [3]
    tokens.action_mask[2:7] = False
    assert rewards(valuer(folder), "4", (sample, tokens)) == ()


def test_the_value_of_the_prompt_alone_is_asked_once_for_a_group(folder):
    model, group = Model(), [answer("hm", "</think>"), answer("</think>"), answer("it", ".", "</think>")]
    given, _ = begin(valuer(folder, model).rewarded(prompt("4"), group)).result()
    assert [[r.value for r in sample.token_rewards] for sample, _ in given] == [
        [pytest.approx(FOUR / 6 - FOUR / 7)],
        [],
        [pytest.approx(FOUR / 6 - FOUR / 8)],
    ]
    assert len(model.asked) == 3


def test_other_answers_go_on_from_each_passage(folder):
    """Other answers go on from two passages of the first one, and from none of the second."""
    group = [answer("hm", ".", "So", "it", "</think>", "4"), answer("</think>", "4")]
    found, others = begin(valuer(folder, rollouts=2).rewarded(prompt(None), group)).result()
    assert [rollout.branch for rollout, _ in [*found, *others]] == [None, None, (0, 0), (0, 0), (0, 1), (0, 1)]
    assert found[0][0].token_rewards == (TokenReward(3, UTILITY, 0.0), TokenReward(5, UTILITY, 0.0))
    kept = [WORDS.index(word) for word in ("hm", ".", "So", "it")]
    assert [tokens.ids.tolist()[2:] for _, tokens in others] == [
        [*kept[:2], 0],
        [*kept[:2], 1],
        [*kept, 0],
        [*kept, 1],
    ]
    alone = begin(valuer(folder, rollouts=2).rewarded(prompt(None), group[1:])).result()
    assert alone == (group[1:], [])


@pytest.mark.parametrize(
    ("truth", "reason"),
    [
        ("  ", "prompt row: column `ground_truth` has '  ', but rollout.prefix_values needs text or a number"),
        ({"a": 1}, "has {'a': 1}, but"),
        (["4", True], "has True, but"),
        (["4", 10**130], "`force` and the answer '1000.* have 135 tokens, above rollout.prefix_values.forced_tokens"),
    ],
)
def test_an_answer_that_has_no_tokens_is_refused(folder, truth, reason):
    with pytest.raises(ValueError, match=reason):
        valuer(folder).wanted(prompt(truth))


def test_utilities_and_their_options():
    values, lengths = [-3.0, -1.0, -1.5, -1.5005], [10, 100, 50]
    changes = [2.0, -0.5, -0.0005]
    for keys, expected in (
        ({}, changes),
        ({"positive_only": True}, [2.0, 0.0, 0.0]),
        ({"clip": 0.25}, [0.25, -0.25, -0.0005]),
        ({"idle_cost": 0.1, "max_tokens": 100}, [2.0, -0.5, -0.0005 - 0.05]),
    ):
        assert utilities(values, lengths, PrefixValues(**keys)) == pytest.approx(expected, abs=1e-12)
    assert sum(utilities(values, lengths, PrefixValues())) == pytest.approx(values[-1] - values[0])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, above max_tokens, which is 8"),
        ({"markers": ("So ", "")}, "markers has an empty text"),
        ({"floor": 0.0}, "less than 0"),
        ({"rollouts": 0}, "greater than 0"),
        ({"rollouts": 9, "floor": -5.0}, "need no right answer, so floor means nothing"),
    ],
)
def test_the_configuration_refuses_what_means_nothing(keys, reason):
    with pytest.raises(ValueError, match=reason):
        PrefixValues(**keys)


def test_the_trainer_gets_each_beginning_with_each_right_answer(folder):
    model = Model()
    given = [answer("hm", "So", "it", "</think>", "4"), answer("</think>")]
    found, probes = begin(valuer(folder, model, by="trainer").rewarded(prompt(["4", "42"]), given)).result()
    assert not model.asked
    assert [(r.position, r.kind, r.value) for r in found[0][0].token_rewards] == [(2, UTILITY, 0.0), (4, UTILITY, 0.0)]
    assert len(found) == 2 and not any(rollout.branch for rollout, _ in found)
    assert [sample.branch for sample, _ in probes[::2]] == [FROM_PROMPT, Branch(0, 0), Branch(0, 1)]
    thought = [WORDS.index(word) for word in ("hm", "So", "it")]
    for (sample, tokens), num, right in zip(probes, [0, 0, 1, 1, 3, 3], [[FOUR], [FOUR, TWO]] * 3, strict=True):
        assert tokens.ids.tolist() == [9, 9, *thought[:num], *FORCE, *right] and sample.length == len(tokens.ids)
        assert tokens.ids[tokens.action_mask].tolist() == right and sample.num_actions == len(right)
