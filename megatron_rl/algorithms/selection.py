"""Choosing tokens from a whole mini-batch that is in many micro-batches on many ranks.

The k-th largest of all numbers is found without collecting them on one rank (a radix select). Each number becomes an
integer key of 32 bits that keeps the order. Two histograms of 65,536 bins, summed over the ranks, give the k-th largest
key exactly. Invariants: exactly the tokens whose keys are at or above the k-th largest key are chosen, so of equal keys
all or none are chosen; micro-batches, packing and ranks make no difference.

Shape letters: T packed tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.algorithms.whitening import SumOverRanks

BINS = 2**16


def choose_largest(
    values: Sequence[Tensor], masks: Sequence[Tensor], count: int, sum_over_ranks: SumOverRanks
) -> list[Tensor]:
    """bool [T] for each micro-batch: the `count` tokens with the largest values, compared as fp32, among the tokens
    whose mask is True."""
    return _at_least_kth([ordered_key(value_T) for value_T in values], masks, count, sum_over_ranks)


def choose_random(
    tokens: Sequence[Tensor], masks: Sequence[Tensor], count: int, sum_over_ranks: SumOverRanks
) -> list[Tensor]:
    """bool [T] for each micro-batch: `count` tokens, drawn by a hash of their numbers `tokens`, among the tokens whose
    mask is True."""
    return _at_least_kth([hash_key(token_T) for token_T in tokens], masks, count, sum_over_ranks)


def ordered_key(value_T: Tensor) -> Tensor:
    """int64 in [0, 2^32), in the order of the values as fp32. NaN counts as -inf."""
    finite_T = value_T.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0  # -0 becomes 0
    bits_T = finite_T.view(torch.int32).long()
    # Positive floats have the order of their bits, and negative ones the reverse order.
    return torch.where(bits_T < 0, -1 - (bits_T & 0x7FFFFFFF), bits_T) + 2**31


def hash_key(token_T: Tensor) -> Tensor:
    """A pseudo-random int64 in [0, 2^32): the upper half of the finaliser of splitmix64 (Steele et al. 2014)."""
    x_T = token_T + _signed(0x9E3779B97F4A7C15)
    x_T = (x_T ^ _shifted(x_T, 30)) * _signed(0xBF58476D1CE4E5B9)
    x_T = (x_T ^ _shifted(x_T, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(x_T ^ _shifted(x_T, 31), 32)


def _at_least_kth(
    keys: Sequence[Tensor], masks: Sequence[Tensor], count: int, sum_over_ranks: SumOverRanks
) -> list[Tensor]:
    upper, above = _kth_bin(
        [(key_T >> 16)[mask_T] for key_T, mask_T in zip(keys, masks, strict=True)], count, sum_over_ranks
    )
    lower, _ = _kth_bin(
        [(key_T & (BINS - 1))[mask_T & (key_T >> 16 == upper)] for key_T, mask_T in zip(keys, masks, strict=True)],
        count - above,
        sum_over_ranks,
    )
    threshold = upper * BINS + lower
    return [mask_T & (key_T >= threshold) for key_T, mask_T in zip(keys, masks, strict=True)]


def _kth_bin(bins: Sequence[Tensor], k: int, sum_over_ranks: SumOverRanks) -> tuple[int, int]:
    """The bin of the k-th largest number, and how many numbers are in higher bins. It is bin 0 if there are fewer than
    k numbers."""
    none = torch.zeros(BINS, dtype=torch.int64, device=bins[0].device)
    histogram = sum((torch.bincount(b, minlength=BINS) for b in bins), none)
    from_top = sum_over_ranks(histogram).flip(0).cumsum(0)
    place = min(int((from_top < k).sum()), BINS - 1)
    return BINS - 1 - place, int(from_top[place - 1]) if place else 0


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _shifted(x_T: Tensor, places: int) -> Tensor:
    """The logical shift to the right; the operator >> would repeat the sign bit of an int64."""
    return (x_T >> places) & ((1 << (64 - places)) - 1)
