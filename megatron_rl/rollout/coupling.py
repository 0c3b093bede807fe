"""Speculation that changes no token: how the ranks of an engine verify drafts.

The noise of a token belongs to its seed and its position (`noise_seeds`), so the logits of a position decide its token.
A step computes an answer's next tokens as if its drafts were right: one row of logits behind each draft. The engine's
ordinary sampler draws a token from every row, with the noise of the row's position. The draws up to and including the
first one that differs from its draft are the answer's next tokens, because all that they have seen is right; the rows
behind it are dropped. A draft is accepted with the probability that the model gives it, as with
rejection sampling (Leviathan et al. 2022, arXiv:2211.17192), but the tokens and their log-probs are the same as without
drafts, up to the rounding of steps of other sizes.

vLLM's own rejection sampler draws from other noise. On a CPU it also reads uninitialised memory (vllm#55005).

Invariants (tests/unit/rollout): what `accept` takes is what a loop without drafts would have drawn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

NO_TOKEN = -1
"""What vLLM's runner takes for a row that was dropped."""


def noise_seeds(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64 [B], not negative: a hash of each request's seed and of the number of tokens before the one that is sampled
    (SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x: np.ndarray = seeds.astype(np.uint64) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    noise: np.ndarray = ((x ^ (x >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
    return noise


def accept(draws: np.ndarray, drafts: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    """int64 [B]: how many of its draws each request takes, at least 1.

    Args:
        draws: [R], the token that was drawn behind each token of a step. A request has one row more than drafts: its
            first row is behind its last token, and each other row behind a draft.
        drafts: [R - B], the drafts of all requests, in their order.
        num_drafts: [B].

    Example: a request with the drafts 5, 6, 7 and the draws 5, 6, 9, 2 takes the draws 5, 6 and 9. Where the third
    draft was, 9 is right, and the last draw has seen a wrong token. `accept([5, 6, 9, 2], [5, 6, 7], [3])` is `[3]`.
    """
    owner = np.repeat(np.arange(len(num_drafts)), num_drafts)
    each = np.arange(len(drafts))
    differs = draws[each + owner] != drafts  # each request before has one row more than drafts
    offset = each - (np.cumsum(num_drafts) - num_drafts)[owner]
    taken = num_drafts + 1
    np.minimum.at(taken, owner[differs], offset[differs] + 1)
    return taken


class SeededSampler:
    """Takes the place of parts of the sampler of vLLM's model runner V1."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._rows: tuple[np.ndarray, np.ndarray] | None = None
        """The request of each row of logits, and the number of drafts before it; None: one row for each request."""

    def draw(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token from each row, and the log-probs of the row. This takes the place of vLLM's `TopKTopPSampler`."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        generators.clear()
        runner, batch = self._runner, self._runner.input_batch
        seeds = np.array([runner.requests[name].sampling_params.seed for name in batch.req_ids])
        positions = batch.num_tokens_no_spec[: len(seeds)]
        if self._rows is not None:
            owner, offset = self._rows
            seeds, positions = seeds[owner], positions[owner] + offset
        logits = apply_top_k_top_p(logits, k, p).float()
        tokens = torch.ops._C.fused_gumbel_argmax(logits, torch.from_numpy(noise_seeds(seeds, positions)))
        return tokens, logits.log_softmax(-1)

    def verify(
        self, metadata: SpecDecodeMetadata, draft_probs: None, logits: torch.Tensor, sampling: SamplingMetadata
    ) -> SamplerOutput:
        """The tokens of a step with drafts. This takes the place of vLLM's `RejectionSampler`.

        Args:
            logits: [R, vocabulary], as in `accept`.

        Returns:
            `sampled_token_ids` [B, 1 + most drafts], with NO_TOKEN behind the tokens that a request takes; the
            log-probs have the rows of this table, one after the other.
        """
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        sample = self._runner.sampler
        if not metadata.max_spec_len:
            ordinary: SamplerOutput = sample(logits, sampling)
            return ordinary
        num_drafts = np.array(metadata.num_draft_tokens)
        num_rows = num_drafts + 1
        first = np.cumsum(num_rows) - num_rows
        owner = np.repeat(np.arange(len(num_rows)), num_rows)
        self._rows = owner, np.arange(len(owner)) - first[owner]
        given = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
        by_row = {name: value[torch.from_numpy(owner)] for name, value in given.items() if value is not None}
        drawn: SamplerOutput = sample(logits, replace(sampling, **by_row))
        self._rows = None

        draws = drawn.sampled_token_ids[:, 0].numpy()
        column = np.arange(num_rows.max())
        row_BK = np.minimum(first[:, None] + column, len(draws) - 1)
        is_taken = column < accept(draws, metadata.draft_token_ids.numpy(), num_drafts)[:, None]
        tokens = torch.from_numpy(np.where(is_taken, draws[row_BK], NO_TOKEN).astype(np.int32))
        logp = drawn.logprobs_tensors
        if logp is not None:
            rows = torch.from_numpy(row_BK.ravel())
            columns = logp.logprob_token_ids, logp.logprobs, logp.selected_token_ranks
            logp = LogprobsTensors(*(values[rows] for values in columns))
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logp)


class NoProposer:
    """What vLLM's workers ask for drafts, in vain: the engine's process has them (`drafts.py`), because only it knows
    the other answers of a group."""

    def __init__(self, config: Any) -> None:
        """vLLM gives its configuration."""

    def load_model(self, target: Any) -> None:
        """It has none."""

    def propose(self, *arguments: Any, **options: Any) -> list[list[int]]:
        return []
