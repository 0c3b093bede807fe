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

from megatron_rl.algorithms.columns import PackedColumns
from megatron_rl.types import Tokens


@dataclass(frozen=True, slots=True)
class TrainSample:
    name: str
    """For error messages: prompt and index in its group."""
    tokens: Tokens
    advantage: float
    """Shared by every action token of the sample."""
    weight: float
    """What each action token's loss is multiplied by: aggregation and denominators in one."""
    index: int = 0
    """In the step: with the position it names a token, whatever the packing."""
    version: int = 0
    """The weights that the step begins with."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One packed row. An empty micro-batch is one dummy sequence without actions."""

    names: tuple[str, ...]
    """Of the samples; `columns.sample_T` is an index into them."""
    lengths_S: Tensor
    """int64 [S], on the CPU: tokens of each sequence, alignment padding included; they sum to T."""
    ids_T: Tensor
    target_T: Tensor
    """The next token of the same sample; 0 where there is none."""
    columns: PackedColumns

    def to(self, device: torch.device) -> Microbatch:
        columns = {f.name: getattr(self.columns, f.name) for f in fields(self.columns)}
        moved = {name: x_T.to(device) for name, x_T in columns.items() if x_T is not None}
        return replace(
            self,
            ids_T=self.ids_T.to(device),
            target_T=self.target_T.to(device),
            columns=replace(self.columns, **moved),
        )


def pack(samples: Sequence[TrainSample], alignment: int) -> Microbatch:
    """One micro-batch, each sequence padded to a multiple of `alignment`.

    Raises:
        ValueError: a sample whose arrays differ in length, or that is empty; by name.
    """
    lengths = [_length(sample) for sample in samples]
    padded = [-(-length // alignment) * alignment for length in lengths] or [alignment]
    num_tokens = sum(padded)
    ids_T, target_T = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
    action_mask_T, logp_rollout_T = np.zeros(num_tokens, bool), np.zeros(num_tokens, np.float32)
    token_T, lag_T = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int32)
    start = 0
    for sample, length, room in zip(samples, lengths, padded):
        tokens = sample.tokens
        here, predicting = slice(start, start + length), slice(start, start + length - 1)
        ids_T[here] = tokens.ids
        target_T[predicting] = tokens.ids[1:]
        action_mask_T[predicting] = tokens.action_mask[1:]
        logp_rollout_T[predicting] = tokens.logp_rollout[1:]
        lag_T[predicting] = np.where(tokens.action_mask[1:], sample.version - tokens.version[1:], 0)
        token_T[start : start + room] = (sample.index << 32) + np.arange(1, room + 1)
        start += room

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values or [0.0], np.float32), padded))

    return Microbatch(
        names=tuple(sample.name for sample in samples),
        lengths_S=torch.tensor(padded),
        ids_T=torch.from_numpy(ids_T),
        target_T=torch.from_numpy(target_T),
        columns=PackedColumns(
            action_mask_T=torch.from_numpy(action_mask_T),
            sample_T=torch.from_numpy(np.repeat(np.arange(len(padded)), padded)),
            token_T=torch.from_numpy(token_T),
            weight_T=spread([sample.weight for sample in samples]),
            advantage_T=spread([sample.advantage for sample in samples]),
            logp_rollout_T=torch.from_numpy(logp_rollout_T),
            lag_T=torch.from_numpy(lag_T),
        ),
    )


def _length(sample: TrainSample) -> int:
    tokens = sample.tokens
    lengths = [len(x) for x in (tokens.ids, tokens.action_mask, tokens.logp_rollout, tokens.version)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(
            f"sample {sample.name}: ids, action_mask, logp_rollout and version have {', '.join(map(str, lengths))} "
            "entries; they must be equal in number and at least 1"
        )
    return lengths[0]
