"""Samples to packed micro-batches: one row of tokens after tokens, no padding but the alignment's.

Invariants (tests/unit/actor): entry t of every column speaks of the token that position t predicts, the next
one of the same sample; a sample's last position and the padding predict nothing and are no actions; the same
samples in another packing give the same columns, sample by sample.

Shape letters: T packed tokens, S samples of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.types import Tokens


@dataclass(frozen=True, slots=True)
class TrainSample:
    name: str
    """For error messages: prompt and index in its group."""
    tokens: Tokens
    advantage: float
    """Shared by every action token of the sample."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One packed row. An empty micro-batch is one dummy sequence without actions."""

    names: tuple[str, ...]
    lengths_S: Tensor
    """int64 [S], on the CPU: tokens of each sequence, alignment padding included; they sum to T."""
    ids_T: Tensor
    target_T: Tensor
    """The next token of the same sample; 0 where there is none."""
    action_mask_T: Tensor
    """bool: the target is an action."""
    advantage_T: Tensor
    logp_rollout_T: Tensor
    sample_T: Tensor
    """int64: index into names."""
    logp_old_T: Tensor | None = None
    """Filled by the actor where the objective needs it."""

    def to(self, device: torch.device) -> Microbatch:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: v.to(device) for k, v in columns.items() if isinstance(v, Tensor) and k != "lengths_S"}
        return replace(self, **moved)


def pack(samples: Sequence[TrainSample], alignment: int) -> Microbatch:
    """One micro-batch, each sequence padded to a multiple of `alignment`.

    Raises:
        ValueError: a sample whose arrays differ in length, or that is empty; by name.
    """
    lengths = [_length(sample) for sample in samples]
    padded = [-(-length // alignment) * alignment for length in lengths] or [alignment]
    num_tokens = sum(padded)
    ids_T = np.zeros(num_tokens, np.int64)
    target_T = np.zeros(num_tokens, np.int64)
    action_mask_T = np.zeros(num_tokens, bool)
    logp_rollout_T = np.zeros(num_tokens, np.float32)
    start = 0
    for sample, length, room in zip(samples, lengths, padded):
        tokens = sample.tokens
        here, predicting = slice(start, start + length), slice(start, start + length - 1)
        ids_T[here] = tokens.ids
        target_T[predicting] = tokens.ids[1:]
        action_mask_T[predicting] = tokens.action_mask[1:]
        logp_rollout_T[predicting] = tokens.logp_rollout[1:]
        start += room
    advantages = np.array([sample.advantage for sample in samples] or [0.0], np.float32)
    return Microbatch(
        names=tuple(sample.name for sample in samples),
        lengths_S=torch.tensor(padded),
        ids_T=torch.from_numpy(ids_T),
        target_T=torch.from_numpy(target_T),
        action_mask_T=torch.from_numpy(action_mask_T),
        advantage_T=torch.from_numpy(np.repeat(advantages, padded)),
        logp_rollout_T=torch.from_numpy(logp_rollout_T),
        sample_T=torch.from_numpy(np.repeat(np.arange(len(padded)), padded)),
    )


def _length(sample: TrainSample) -> int:
    tokens = sample.tokens
    lengths = [len(tokens.ids), len(tokens.action_mask), len(tokens.logp_rollout)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(
            f"sample {sample.name}: ids, action_mask and logp_rollout have {lengths[0]}, {lengths[1]} and "
            f"{lengths[2]} entries; they must be equal and at least 1"
        )
    return lengths[0]
