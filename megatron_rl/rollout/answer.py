"""What an answer takes from vLLM's outputs and from the records of earlier engines, and its seed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.models.adapters import PINNED_ID
from megatron_rl.rollout.program import Completion

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput


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
    if output.lora_request is not None and output.lora_request.lora_int_id == PINNED_ID:
        versions = [int(output.lora_request.lora_name)] * len(versions)
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
