"""Finds the tokens whose own part of the loss has the largest gradient, with few passes.

The norm of each token's gradient would need a pass for each token. So the step is halved again and again, and the half
with the largest norm is looked at first. Gradients of tokens may cancel in their sum, so a pair of large ones can hide
from each other; a token that makes the norm of a whole step cannot hide.

Invariant (tests/unit/explain): with gradients that do not cancel, the largest token is found, in at most
2 log2(tokens) passes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from megatron_rl.types import Gradient, TokenSpan


@dataclass(frozen=True, slots=True)
class FoundSpan:
    part: TokenSpan
    gradient: Gradient

    @property
    def is_token(self) -> bool:
        return len(self.part.samples) == 1 and self.part.stop - self.part.start == 1


def largest_tokens(
    gradient_of: Callable[[TokenSpan], Gradient],
    samples: Sequence[int],
    tokens: Mapping[int, tuple[int, int]],
    *,
    num_tokens: int,
    num_passes: int,
) -> list[FoundSpan]:
    """The parts with the largest gradients that were looked at, the largest first: samples, pieces of them, and tokens.

    Args:
        gradient_of: one pass.
        samples: the samples to look at. They are halved in this order, so neighbours should lie in one micro-batch.
        tokens: of each sample the first and the last action, as [start, stop).
        num_tokens: the search ends when this number of single tokens has been found.
        num_passes: the search ends after this number of passes.
    """
    found: list[FoundSpan] = []
    waiting: list[tuple[float, int, FoundSpan]] = []
    order = count()

    def look(part: TokenSpan) -> None:
        one = FoundSpan(part, gradient_of(part))
        found.append(one)
        heapq.heappush(waiting, (-one.gradient.norm, next(order), one))

    look(TokenSpan(tuple(samples)))
    left = num_tokens
    while waiting and left and len(found) < num_passes:
        _, _, largest = heapq.heappop(waiting)
        if largest.is_token:
            left -= 1
            continue
        for part in halves(largest.part, tokens):
            look(part)
    return sorted(found, key=lambda one: -one.gradient.norm)


def halves(part: TokenSpan, tokens: Mapping[int, tuple[int, int]]) -> list[TokenSpan]:
    """A part in two pieces: half of its samples each, or of one sample half of its tokens each. A sample of one token
    is the token."""
    if len(part.samples) > 1:
        middle = len(part.samples) // 2
        return [TokenSpan(part.samples[:middle]), TokenSpan(part.samples[middle:])]
    first, last = tokens[part.samples[0]]
    start, stop = max(part.start, first), min(part.stop, last)
    middle = (start + stop) // 2
    pieces = [TokenSpan(part.samples, start, middle), TokenSpan(part.samples, middle, stop)]
    return [piece for piece in pieces if piece.start < piece.stop]
