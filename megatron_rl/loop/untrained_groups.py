"""Groups that nobody trains on: the answers of an evaluation, and the greedy answers that a baseline needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.ports import Stream
from megatron_rl.types import Group, GroupRequest, Prompt

Asked = Mapping[int, Group | None]
"""Groups by their numbers; None until they have come."""


class AsideGroups:
    """Asks for groups that nobody trains on. Their numbers are -1, -2, ..., and the groups of steps have 0, 1, ..."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.evaluation: Asked = {}
        """The evaluation that is under way."""
        self._num_asked = 0
        self._waiting: dict[int, dict[int, Group | None]] = {}
        """The batch of each group that has not come."""

    def ask(self, prompts: Sequence[Prompt], num_samples: int, version: int, seed: int, is_greedy: bool) -> Asked:
        """
        Args:
            seed: the first number of the answers' seeds. The second one is the prompt's place.

        Returns:
            The numbers, whose groups come with `take`.
        """
        numbers = [-self._num_asked - 1 - i for i in range(len(prompts))]
        self._num_asked += len(prompts)
        batch: dict[int, Group | None] = dict.fromkeys(numbers)
        self._waiting |= dict.fromkeys(numbers, batch)
        requests = [
            GroupRequest(number, prompt, num_samples, (seed, i), is_greedy)
            for i, (number, prompt) in enumerate(zip(numbers, prompts, strict=True))
        ]
        self._stream.ask(requests, version)
        return batch

    def take(self, number: int, group: Group) -> bool:
        """Put a group that has come where `ask` promised it. Returns False if nobody asked for it here."""
        batch = self._waiting.pop(number, None)
        if batch is None:
            return False
        batch[number] = group
        return True

    def cancel_evaluation(self) -> None:
        """Stop the generation of its groups that have not come."""
        for number in [number for number, group in self.evaluation.items() if group is None]:
            self._stream.cancel(number)
            del self._waiting[number]
        self.evaluation = {}
