"""One answer of an engine while its program goes on, and what it takes from vLLM's outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.rollout.program import Call, Completion, Transcript
from megatron_rl.rollout.programs.budgets import Chosen
from megatron_rl.rollout.request_queue import Request

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

NOTHING = Completion((), (), (), stopped=False)


@dataclass(slots=True)
class BegunAnswer:
    """An answer whose program goes on while others do."""

    prompt_ids: Sequence[int]
    name: tuple[int, int] | None
    """The ticket of the group and the number of the sample; None: its tokens are not recorded."""
    chosen: Chosen
    transcript: Transcript
    call: Call | None
    """The call that is running; None if the answer is complete."""
    begun: Completion
    """What an earlier engine has sampled of this call."""
    seed: int
    is_greedy: bool = False

    @property
    def request(self) -> Request:
        assert self.call is not None, "a complete answer asks for nothing"
        sampled = [*self.transcript.ids, *self.begun.ids]
        call = replace(self.call, max_tokens=self.call.max_tokens - len(self.begun.ids))
        return Request([*self.prompt_ids, *sampled], call, self.seed, self.is_greedy, self.name, len(sampled) > 0)

    def sampled(self, rest: Completion) -> None:
        """Complete the call."""
        begun = self.begun
        ids, logp, version = (*begun.ids, *rest.ids), (*begun.logp, *rest.logp), (*begun.version, *rest.version)
        self.transcript.sampled(Completion(ids, logp, version, rest.stopped, rest.routes))
        self.begun = NOTHING


def request_seed(*parts: int) -> int:
    """The seed of the first answer to a prompt, of 62 bits; the seed of answer i is larger by i."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 2


def sampled_before(rows: np.ndarray) -> Completion:
    """What the records of earlier engines have of an answer."""
    ids, logp, version = (rows[column].tolist() for column in ("token", "logp", "version"))
    return Completion(ids, logp, version, stopped=False)


def completion_of(output: RequestOutput, stop_ids: Collection[int]) -> Completion:
    """
    Args:
        stop_ids: the tokens that end an answer.
    """
    [answer] = output.outputs
    given = answer.logprobs
    logp = [given.logprobs[i] for i in given.start_indices]  # the sampled token's is the first one of each
    versions = [int(span.version) for span in answer.weight_versions for _ in range(span.start, span.end)]
    assert len(logp) == len(versions) == len(answer.token_ids)
    routes = answer.routed_experts
    if routes is not None:  # the newest ones are at the end; the last token is never computed
        routes = routes[-(len(output.prompt_token_ids) + len(answer.token_ids) - 1) :]
    ended = answer.finish_reason == "stop" and answer.token_ids[-1] in stop_ids
    candidates = dict(zip(given.token_ids, given.logprobs, strict=True)) if len(given.logprobs) > len(logp) else {}
    return Completion(answer.token_ids, logp, versions, ended, routes, candidates, prompt_logp(output))


def prompt_logp(output: RequestOutput) -> list[float]:
    """See `Completion.prompt_logp`."""
    given = output.prompt_logprobs
    if given is None:
        return []
    # The first token has none. What vLLM gives for tokens of the cache depends on its model runner.
    num_computed = len(output.prompt_token_ids) - (output.num_cached_tokens or 0) - 1
    return [given.logprobs[i] for i in given.start_indices[len(given) - num_computed :]]
