"""The order of the sources of a mixture.

Invariants (tests/unit/data): in the first n turns, for every n, each source has less than one turn more or less than
n times its share. The order repeats after as many turns as the sum of the shares in lowest terms.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

MAX_TURNS = 1_000_000
"""The largest number of turns after which an order repeats. Its table has 6 bytes for each turn."""


def whole_shares(shares: Mapping[str, float]) -> dict[str, int]:
    """The shares of sources by their names in lowest terms: {"a": 0.75, "b": 0.25} becomes {"a": 3, "b": 1}. A number
    counts as the decimal number that it is printed as, so that 0.1 is a tenth.

    Raises:
        ValueError: a share is not positive, or the order would not repeat within MAX_TURNS turns.
    """
    for name, share in shares.items():
        if not 0 < share < math.inf:
            raise ValueError(f"the source {name} has the share {share}, so it would be empty; raise it, or remove it")
    exact = [Fraction(repr(share)) for share in shares.values()]
    unit = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * unit) for share in exact]
    lowest = [share // math.gcd(*whole) for share in whole]
    if sum(lowest) > MAX_TURNS:
        raise ValueError(
            f"the shares {dict(shares)} of the sources repeat only after {sum(lowest):,} prompts, and {MAX_TURNS:,} "
            f"are the most; give them with fewer digits"
        )
    return dict(zip(shares, lowest, strict=True))


def turns_of(shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Which source has each turn of a period, by earliest deadline first (Tijdeman 1980, the chairman assignment
    problem): the k-th turn of a source with share s of P must come within the turns floor(k P / s) and
    ceil((k + 1) P / s). All turns of all sources keep these bounds, and they bound the deviation of every beginning.

    Args:
        shares: positive whole numbers.

    Returns:
        The source of each turn, and the number of turns that this source had before; uint16 and int32, of length
        sum(shares).
    """
    period = sum(shares)
    order, before = np.zeros(period, np.uint16), np.zeros(period, np.int32)
    later, ready = [(0, source, 0) for source in range(len(shares))], list[tuple[int, int, int]]()
    for turn in range(period):
        while later and later[0][0] <= turn:
            _, source, k = heapq.heappop(later)
            heapq.heappush(ready, (-(-(k + 1) * period // shares[source]), source, k))
        _, source, k = heapq.heappop(ready)
        order[turn], before[turn] = source, k
        heapq.heappush(later, ((k + 1) * period // shares[source], source, k + 1))
    return order, before
