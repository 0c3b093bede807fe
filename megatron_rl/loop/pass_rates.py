"""How often the answers to each prompt are right, and which prompts rest because all of them are.

A prompt whose answers are all right gives no signal, so generating them is lost work. But a policy may forget. So the
prompt rests for one epoch, and, if it is still easy afterwards, for two, four and at most MAX_REST epochs, as the cards
of a Leitner system do.

Invariants (tests/unit/loop): a prompt rests only after a group whose answers were all right, and never for more than
MAX_REST epochs in a row; a restored table decides like the saved one.
"""

from __future__ import annotations

from typing import Any

MAX_REST = 8
"""The largest number of epochs that a prompt rests."""


class PassRates:
    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int, int]] = {}
        """The newest pass rate of each prompt, the number of its last groups in a row that were all right, and the
        first epoch when it does not rest."""

    def record(self, uid: str, rate: float, epoch: int) -> None:
        """Note a group.

        Args:
            rate: the share of right answers.
            epoch: the epoch when the prompt was drawn.
        """
        _, times, _ = self._seen.get(uid, (0.0, 0, 0))
        times = times + 1 if rate == 1 else 0
        rest = min(2 ** (times - 1), MAX_REST) if times else 0
        self._seen[uid] = rate, times, epoch + 1 + rest

    def rests(self, uid: str, epoch: int) -> bool:
        """Whether the prompt is left out of this epoch."""
        return epoch < self._seen.get(uid, (0.0, 0, 0))[2]

    def state(self) -> dict[str, Any]:
        """The table in JSON's types."""
        return {uid: list(row) for uid, row in self._seen.items()}

    def restore(self, state: dict[str, Any]) -> None:
        self._seen = {uid: (rate, times, until) for uid, (rate, times, until) in state.items()}
