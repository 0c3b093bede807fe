"""Rewards of answers with several turns."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.config.rewards import EnvironmentReward, ExactAnswerReward, LengthReward
from megatron_rl.types import Episode, Prompt, Rollout, TokenReward, Tokens, Verdict
from megatron_rl.verifiers import RewardSet, TrainerState, answers_of

PROMPT = Prompt("rows.jsonl:7", (1, 2), "ab", {"ground_truth": "42"})


class Letters:
    """Each token is the character of its code; 0 ends a turn."""

    def decode(self, ids, *, skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids if i)


def verdict(cfg, text: str, last_turn: int, fault: str = "", rewards: tuple = (), delimiter: str = "") -> Verdict:
    """On an answer whose turns end with `|`. Its last turn begins at this character."""
    ids = [*PROMPT.token_ids, *(0 if letter == "|" else ord(letter) for letter in text)]
    tokens = Tokens(np.array(ids), np.ones(len(ids), bool), np.zeros(len(ids)), np.zeros(len(ids)))
    episode = Episode(2, 2 + last_turn, fault=fault)
    rollout = Rollout(len(ids), 2, len(text), 0, "stop", token_rewards=rewards, episode=episode)
    answers = answers_of([PROMPT], [[tokens]], [[rollout]])
    rewards_of_run = RewardSet([cfg], Letters(), delimiter)
    [scored] = rewards_of_run.score(rewards_of_run.calls[0], answers, TrainerState(0, 1))
    return scored.verdicts[0]


def test_the_last_turn_is_what_is_judged():
    assert verdict(ExactAnswerReward(), "6*7|42|42|", 7).score == 1
    assert verdict(ExactAnswerReward(), "42|what?|43|", 9).score == 0
    with_thoughts = "t</think>6*7|42|u</think>42|"
    assert verdict(ExactAnswerReward(), with_thoughts, 16, delimiter="</think>").score == 1
    assert verdict(ExactAnswerReward(), "t</think>6*7|42|42|", 16, delimiter="</think>").score == 0


def test_the_rewards_of_the_turns_are_added():
    of_turns = (TokenReward(3, "environment", 0.25), TokenReward(5, "environment", -1.0))
    other = TokenReward(5, "step", 9.0)
    assert verdict(EnvironmentReward(), "a|b|", 2, rewards=(*of_turns, other)) == Verdict(-0.75)
    assert verdict(EnvironmentReward(), "a|b|", 2, rewards=(other,)) == Verdict(None, "the environment gave no reward")


def test_rewards_that_add_up_to_no_float32_are_no_score():
    most = tuple(TokenReward(3, "environment", 3e38) for _ in range(2))
    found = verdict(EnvironmentReward(), "a|b|", 2, rewards=most)
    assert found.failed and "the rewards of the turns add up to more than 3.4e+38" in found.reason


@pytest.mark.parametrize("cfg", [EnvironmentReward(), ExactAnswerReward(), LengthReward(target=2)])
def test_no_reward_scores_an_answer_whose_environment_failed(cfg):
    rewards = (TokenReward(3, "environment", 0.25),)
    assert verdict(cfg, "a|42|", 2, "it broke down", rewards) == Verdict(None, "it broke down", failed=True)
    with pytest.raises(ValueError, match="rows.jsonl:7: it broke down"):
        verdict(cfg.model_copy(update={"on_error": "stop"}), "a|42|", 2, "it broke down", rewards)
