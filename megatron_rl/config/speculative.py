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
    another answer of its group. `multi_token`: the head of `policy.multi_token`, which is refused, as no engine here
    drafts with it yet."""
    tokens: Annotated[int, Field(ge=1, le=31)] = 8
    """The most tokens that are drafted for an answer in a step. There are fewer if drafts are wrong or many answers
    run."""

    def conflicts(self, run: GrpoRunConfig) -> Iterator[str]:
        rollout = run.rollout
        if self.kind == "multi_token":
            yield (
                "rollout.speculative.kind: multi_token needs a second model in vLLM, whose weights no weight sync "
                "brings yet, so that the head would draft for the policy that the run began with; choose ngram"
            )
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
