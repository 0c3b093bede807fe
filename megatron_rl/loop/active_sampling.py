"""Active sampling: which prompts rest because all their answers are right, and which groups have a signal.

A prompt whose answers are all right gives no signal, so generating them is lost work. But a policy may forget. So the
prompt rests for one epoch, and, if it is still easy afterwards, for two, four and at most MAX_REST epochs, as the cards
of a Leitner system do.

Invariants (tests/unit/loop): a prompt rests only after a group whose answers were all right, and never for more than
MAX_REST epochs in a row; a restored table decides like the saved one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from statistics import fmean
from typing import Any

from megatron_rl.algorithms.equality import all_equal
from megatron_rl.config.schema import GrpoRunConfig
from megatron_rl.data import ShuffledStream
from megatron_rl.loop.evaluation import right_answers
from megatron_rl.loop.rollouts import verdicts_of
from megatron_rl.types import Group, Prompt

NUM_TRIES = 64
"""A run with active sampling ends after this number of batches of groups without any signal."""
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


class ActiveSampling:
    """Draws prompts, and tells which groups a step may train on. Without `rollout.active_sampling` it takes all."""

    def __init__(self, config: GrpoRunConfig, prompts: ShuffledStream[Prompt]) -> None:
        self._config, self._prompts, self.pass_rates = config, prompts, PassRates()
        self.num_resting = 0
        """The number of prompts that rested when their turn came, since somebody set it to 0."""
        self._useless: Counter[str] = Counter()
        """The rewards of the groups without a signal, since the last group with one."""

    def draw(self, count: int, known: Container[int]) -> list[tuple[int, Prompt]]:
        """The next prompts that do not rest, with their numbers. If all prompts of an epoch rest, they are drawn
        nevertheless, and so are the prompts of groups that are `known`."""
        drawn: list[tuple[int, Prompt]] = []
        num_passed = 0
        while len(drawn) < count:
            [(number, prompt)] = self._prompts.take(1)
            rests = self.pass_rates.rests(prompt.uid, self._prompts.epoch(number))
            if rests and number not in known and num_passed < len(self._prompts):
                num_passed += 1
            else:
                drawn.append((number, prompt))
        self.num_resting += num_passed
        return drawn

    def accepts(self, number: int, group: Group, useless_batches: float) -> bool:
        """Whether a step may train on a group: its rewards differ, or it fills the batch."""
        if not (tries := self._config.rollout.active_sampling):
            return True
        verdicts = verdicts_of([group])
        rewards = [verdict.reward for verdict in verdicts]
        if right := right_answers(self._config, verdicts):
            self.pass_rates.record(group.prompt.uid, fmean(right), self._prompts.epoch(number))
        if not all_equal(r for r in rewards if r is not None):
            self._useless.clear()
            return True
        self._useless[", ".join(sorted({"none" if r is None else f"{r:g}" for r in rewards}))] += 1
        return tries is not True and useless_batches >= tries - 1

    def require_a_signal(self) -> None:
        """Raise a ValueError if the last NUM_TRIES batches had none."""
        total = self._useless.total()
        if total >= NUM_TRIES * self._config.rollout.prompts_per_step:
            seen = "; ".join(f"{rewards}: {count} groups" for rewards, count in self._useless.most_common(5))
            raise ValueError(
                f"active sampling found no group with a signal among the last {total}: all answers to a prompt had the "
                f"same reward ({seen}). Check the reward on a few answers (samples.jsonl), choose prompts of another "
                "difficulty, or raise rollout.samples_per_prompt"
            )
