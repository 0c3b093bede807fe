"""The packed rows of a rank's samples in an epoch, and the columns that a step computes at their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl.actor.packing import Microbatch, by_sample, column_of, pack
from megatron_rl.algorithms.columns import PackedColumns
from megatron_rl.algorithms.passes import Column
from megatron_rl.types import Denominators, Share, Vision


class EpochRows:
    """
    Args:
        share: its tokens and columns are at hand.
        share_prompts, vision: see `pack`.

    Raises:
        ValueError: a sample is malformed; the error names it.
    """

    def __init__(self, share: Share, share_prompts: bool, vision: Vision | None = None) -> None:
        self.minibatches = pack(share, share_prompts, vision)
        """`[mini-batch][micro-batch]`"""
        self.denominators: Sequence[Denominators] = share.denominators
        self._columns = share.columns

    def to(self, device: torch.device) -> None:
        """Move the rows, and complete them with the columns of the share."""
        self.minibatches = [[batch.to(device) for batch in rows] for rows in self.minibatches]
        for name, numbers in self._columns.items():
            self.set_numbers(name, numbers)
        self._columns = {}

    def __iter__(self) -> Iterator[Microbatch]:
        return (batch for rows in self.minibatches for batch in rows)

    @property
    def num_tokens(self) -> int:
        """The number of action tokens, on all ranks."""
        return sum(denominators.num_tokens for denominators in self.denominators)

    @property
    def columns(self) -> list[PackedColumns]:
        return [batch.columns for batch in self]

    def set_columns(self, columns: Sequence[PackedColumns]) -> None:
        """Replace the columns of all rows, in their order."""
        remaining = iter(columns)
        self.minibatches = [[replace(batch, columns=next(remaining)) for batch in rows] for rows in self.minibatches]

    def set(self, name: str, values: Sequence[Tensor]) -> None:
        """Set a column of all rows, in their order."""
        self.set_columns([replace(c, **{f"{name}_T": x_T}) for c, x_T in zip(self.columns, values, strict=True)])

    def set_numbers(self, name: str, numbers: Mapping[int, np.ndarray]) -> None:
        """Set a column from the numbers at the tokens of each sample, [L] by its index in the step."""
        self.set(name, [column_of(batch, numbers) for batch in self])

    def numbers(self, name: Column) -> dict[int, np.ndarray]:
        """A column as numbers at the tokens of each sample, [L] by its index in the step (`packing.by_sample`)."""
        found: dict[int, np.ndarray] = {}
        for batch in self:
            found |= by_sample(batch, getattr(batch.columns, f"{name}_T"))
        return found
