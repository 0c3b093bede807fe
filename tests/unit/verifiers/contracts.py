"""Two answers, and what a reward function gives for them."""

from __future__ import annotations

from answering import answered

from megatron_rl.types import Prompt
from megatron_rl.verifiers import RewardSet, Scored, TrainerState
from megatron_rl.verifiers.answer import Answer


class Letters:
    """A token is the code of a character; 0 is special."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join("." if i == 0 else chr(i) for i in ids if i or not skip_special_tokens)


def answer(text: str, messages: object = "What is 1+1?", **columns: object) -> Answer:
    return answered(Prompt("rows.jsonl:1", (1,), messages, columns), [*map(ord, text), 0], "stop")


CHAT = ({"role": "user", "content": "What is 1+1?"},)
STATE = TrainerState(global_step=7, max_steps=100)
TWO = [answer(r"so \boxed{2}", ground_truth="2"), answer("it is 3", ground_truth="2", level=4)]


def scored(cfg, answers=TWO) -> Scored:
    [given] = RewardSet([cfg], Letters(), "").score([0], answers, STATE)
    return given


def scores(cfg, answers=TWO) -> list[float | None]:
    return [verdict.score for verdict in scored(cfg, answers).verdicts]
