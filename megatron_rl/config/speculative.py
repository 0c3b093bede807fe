"""Drafts of tokens, so that a step of an engine gives several tokens of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatron_rl.config.section import Section

if TYPE_CHECKING:
    from megatron_rl.config.schema import GrpoRunConfig


class Speculative(Section):
    kind: Literal["ngram", "multi_token"] = "ngram"
    """What drafts. `ngram`: what followed the answer's last two tokens the last time, in its prompt, in itself or in
    another answer of its group. `multi_token`: the head of `policy.multi_token: train`."""
    tokens: Annotated[int, Field(ge=1, le=31)] = 8
    """The most tokens that are drafted for an answer in a step. `ngram` drafts fewer if drafts are wrong or many
    answers run; 1 to 3 suit a head."""

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        rollout = run.rollout
        if self.kind == "multi_token" and run.policy.multi_token != "train":
            yield (
                f"rollout.speculative.kind is multi_token, but policy.multi_token is {run.policy.multi_token}, so that "
                "no weight sync brings a head; set it to train, or kind to ngram"
            )
        if self.kind == "multi_token" and run.policy.routing_replay:
            yield "rollout.speculative: vLLM on CPUs has no head next to policy.routing_replay; remove one of the two"
        if run.cluster.gpus_per_engine_rank:
            yield (
                "rollout.speculative is for engines on CPUs: on GPUs vLLM's model runner V2 verifies drafts with a "
                "ratio test and noise of its own, so answers would not be those without drafts; set "
                "rollout.speculative to null"
            )
        if rollout.parallel.pipeline > 1:
            yield (
                "rollout.speculative needs the tokens of a step before the next one begins, and with pipeline stages "
                f"(rollout.parallel.pipeline is {rollout.parallel.pipeline}) vLLM begins it earlier; remove one of the "
                "two"
            )
        if rollout.thinking is not None and rollout.thinking.mode == "native":
            yield (
                "rollout.speculative: vLLM's own thinking budget (rollout.thinking.mode: native) forces tokens only "
                "where a step gives an answer one token; set mode to two_call or truncate"
            )
