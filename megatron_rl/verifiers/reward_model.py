"""The reward_model reward: a classifier with one class scores the question with its answer. Here vLLM serves it; in a
process of the run it is `cluster/reward_model.py`.

The request is vLLM's `ClassificationChatRequest`, with the raw logit in place of a probability.

Invariant (tests/unit/verifiers): only a reply with one finite number is a score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat

from megatron_rl.config.rewards import RewardModelReward
from megatron_rl.types import LARGEST_SCORE, Tokenizer
from megatron_rl.verifiers.answer import Answer
from megatron_rl.verifiers.service import ServiceVerifier, parsed


class _Entry(BaseModel):
    probs: list[FiniteFloat]
    """The logits of the classes."""


class _Classification(BaseModel):
    """The parts of vLLM's `ClassificationResponse` that are read."""

    data: Annotated[list[_Entry], Field(min_length=1, max_length=1)]


class RewardModelVerifier(ServiceVerifier):
    path = "/classify"

    def __init__(self, cfg: RewardModelReward, tokenizer: Tokenizer, delimiter: str) -> None:
        super().__init__(cfg, tokenizer, delimiter)
        self._cfg, self.unfinished_score = cfg, cfg.unfinished_score

    def request(self, answer: Answer, text: str) -> Mapping[str, Any]:
        question = answer.prompt.messages
        turns = [{"role": "user", "content": question}] if isinstance(question, str) else map(dict, question)
        messages = [*turns, {"role": "assistant", "content": text}]
        return {"model": self._cfg.model, "messages": messages, "use_activation": False}

    def read(self, answer: Answer, reply: Any) -> float:
        logits = parsed(_Classification, reply).data[0].probs
        if len(logits) != 1:
            raise ValueError(f"the model has {len(logits)} classes, but a reward model has one; serve another model")
        return score_of(self._cfg, logits[0])


def score_of(cfg: RewardModelReward, logit: float) -> float:
    """The score that the configuration makes of a logit.

    Raises:
        ValueError: it is no finite number, or too large.
    """
    score = logit
    if cfg.activation == "sigmoid":
        score = 0.5 * (1 + math.tanh(score / 2))  # the same, without an overflow
    if cfg.clamp is not None:
        score = min(max(score, cfg.clamp[0]), cfg.clamp[1])
    if not abs(score) <= LARGEST_SCORE:
        raise ValueError(f"the logit {logit:g}, but no score may be above {LARGEST_SCORE:g}")
    return score
