"""The search finds the tokens with the largest gradients in few passes."""

from __future__ import annotations

import math
import random

from megatron_rl.explain.search import halves, largest_tokens
from megatron_rl.types import Gradient, TokenSpan


class Planted:
    """Gradients of tokens that are orthogonal: the square of a part's norm is the sum of its tokens' squares."""

    def __init__(self, norms: dict[tuple[int, int], float], usual: float) -> None:
        self.norms, self.usual, self.num_passes = norms, usual, 0

    def __call__(self, part: TokenSpan) -> Gradient:
        self.num_passes += 1
        tokens = [(s, t) for s in part.samples for t in range(*SPANS[s]) if part.start <= t < part.stop]
        return Gradient(math.sqrt(sum(self.norms.get(token, self.usual) ** 2 for token in tokens)), {}, {})


RANDOM = random.Random(0)
SPANS = {sample: (5, 5 + RANDOM.randint(1, 40)) for sample in range(64)}


def test_one_large_token_among_a_thousand_is_found_in_few_passes():
    planted = Planted({(17, 5): 3000.0}, usual=0.1)
    [first, *_] = [
        one for one in largest_tokens(planted, list(SPANS), SPANS, num_tokens=1, num_passes=100) if one.is_token
    ]
    assert (first.part.samples, first.part.start) == ((17,), 5) and first.gradient.norm == 3000
    num_tokens = sum(stop - start for start, stop in SPANS.values())
    assert num_tokens > 1000 and planted.num_passes <= 2 * math.log2(num_tokens) + 3


def test_the_largest_come_first_and_the_passes_end():
    large = {(3, 5): 50.0, (40, 5): 40.0, (41, 5): 30.0}
    found = largest_tokens(Planted(large, usual=0.1), list(SPANS), SPANS, num_tokens=3, num_passes=100)
    tokens = [(one.part.samples[0], one.part.start) for one in found if one.is_token]
    assert tokens[:3] == [*large]
    planted = Planted({}, usual=1.0)
    largest_tokens(planted, list(SPANS), SPANS, num_tokens=3, num_passes=11)
    assert planted.num_passes <= 12, "a part that is halved is looked at in both halves"


def test_the_halves_of_a_part_are_the_part():
    part = TokenSpan((4,))
    assert halves(part, {4: (3, 8)}) == [TokenSpan((4,), 3, 5), TokenSpan((4,), 5, 8)]
    assert halves(TokenSpan((4, 9, 2)), {}) == [TokenSpan((4,)), TokenSpan((9, 2))]
    assert halves(TokenSpan((4,), 3, 4), {4: (3, 4)}) == [TokenSpan((4,), 3, 4)], "a token"
