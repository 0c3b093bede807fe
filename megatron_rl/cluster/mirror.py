"""The trainer's state in the memory of other processes, for a restarted trainer to continue from.

On every node with trainer ranks one process holds the states of the node's own ranks and of the previous node's ranks.
A trainer rank or a whole node can then die without a loss: the state of its ranks is on another node, and the state of
all other ranks is on their own nodes. If there is only one node, its state survives the ranks alone.

Invariants (tests/unit/cluster, tests/e2e): a holder offers a state only when it is complete; it holds the states of the
two newest steps, so that there is always one step that all ranks have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.cluster.process import begin_process
from megatron_rl.cluster.waiting import settle

log = logging.getLogger(__name__)

PIECE_BYTES = 64 * 2**20
"""A state travels in pieces of this size, so that Ray's object store never holds much of it."""
NUM_STEPS = 2
ANSWER_S = 10.0
"""A holder that does not answer within this time is given up."""


class MirrorHolder:
    """The process that holds states in one node's memory."""

    def __init__(self, log: str) -> None:
        begin_process(Path(log), "mirror")
        self._held: dict[int, dict[int, np.ndarray]] = {}
        """The complete states as bytes, as [rank][step]."""
        self._arriving: dict[int, np.ndarray] = {}

    def put(self, rank: int, step: int, start: int, num_bytes: int, piece: np.ndarray) -> None:
        """Take the bytes from `start` on of a state of `num_bytes`. The pieces of a state come in order."""
        if start == 0:
            self._arriving[rank] = np.empty(num_bytes, np.uint8)
        self._arriving[rank][start : start + len(piece)] = piece
        if start + len(piece) == num_bytes:
            of_rank = self._held.setdefault(rank, {})
            of_rank[step] = self._arriving.pop(rank)
            for old in sorted(of_rank)[:-NUM_STEPS]:
                del of_rank[old]

    def held(self) -> list[tuple[int, int]]:
        """The (rank, step) of all complete states."""
        return [(rank, step) for rank, of_rank in self._held.items() for step in of_rank]

    def forget_after(self, step: int) -> None:
        """Remove the states of later steps, which will be done again."""
        for of_rank in self._held.values():
            for later in [s for s in of_rank if s > step]:
                del of_rank[later]

    def get(self, rank: int, step: int, start: int) -> tuple[int, np.ndarray]:
        """The size of a state in bytes, and the piece of it from `start` on."""
        state = self._held[rank][step]
        return len(state), state[start : start + PIECE_BYTES]


def send_state(state: np.ndarray, rank: int, step: int, holders: Mapping[str, Any]) -> list[str]:
    """Send a state, as bytes, to the holders, and return the names of the holders that died or did not answer, which is
    no error."""
    alive = dict(holders)
    for start in range(0, len(state), PIECE_BYTES):
        piece = ray.put(state[start : start + PIECE_BYTES])
        calls = {name: holder.put.remote(rank, step, start, len(state), piece) for name, holder in alive.items()}
        for name, call in calls.items():
            try:
                ray.get(call, timeout=ANSWER_S)
            except (RayActorError, GetTimeoutError) as error:
                log.warning("a mirror is lost: %s", str(error).partition("\n")[0])
                del alive[name]
    return sorted(holders.keys() - alive.keys())


def fetch_state(rank: int, step: int, holder: Any) -> np.ndarray:
    """A rank's state of a step, as bytes, from a holder that offers it."""
    num_bytes, piece = ray.get(holder.get.remote(rank, step, 0))
    state = np.empty(num_bytes, np.uint8)
    start = 0
    while True:
        state[start : start + len(piece)] = piece
        start += len(piece)
        if start == num_bytes:
            return state
        _, piece = ray.get(holder.get.remote(rank, step, start))


class Mirrors:
    """The holders of all nodes, as the driver sees them."""

    def __init__(self, logs: Path, role: str) -> None:
        """
        Args:
            role: the role of the ranks, which names the holders' logs.
        """
        self._logs, self._role = logs, role
        self._holders: dict[str, Any] = {}
        """The actors by Ray's id of their node."""

    def holders_of(self, nodes: Sequence[str]) -> list[dict[str, Any]]:
        """The holders of each rank, by node: its own node's holder and the next node's. Missing ones are started.

        Args:
            nodes: for each rank, Ray's id of its node.
        """
        ring = sorted(set(nodes))
        for number, node in enumerate(ring):
            if node not in self._holders:
                on_the_node = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = ray.remote(MirrorHolder).options(num_cpus=0, scheduling_strategy=on_the_node)
                self._holders[node] = actor.remote(str(self._logs / f"mirror_{self._role}_{number}.log"))
        after = {node: ring[(i + 1) % len(ring)] for i, node in enumerate(ring)}
        return [{there: self._holders[there] for there in (node, after[node])} for node in nodes]

    def give_up(self, node: str) -> None:
        """End the holder of a node; another one takes its place."""
        if node in self._holders:
            ray.kill(self._holders.pop(node))

    def offers(self) -> dict[tuple[int, int], Any]:
        """A holder for each (rank, step) that a living holder has. Holders that do not answer are given up."""
        nodes = list(self._holders)
        answers = settle([self._holders[node].held.remote() for node in nodes], ANSWER_S)
        found: dict[tuple[int, int], Any] = {}
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, RayError):
                log.warning("a mirror is lost: %s", str(answer).partition("\n")[0])
                self.give_up(node)
            else:
                found |= dict.fromkeys(answer, self._holders[node])
        return found

    def forget_after(self, step: int) -> None:
        settle([holder.forget_after.remote(step) for holder in self._holders.values()], ANSWER_S)


def whole_steps(offers: dict[tuple[int, int], Any], num_ranks: int) -> list[int]:
    """The steps whose state is there for all ranks."""
    steps = {step for _, step in offers}
    return sorted(step for step in steps if all((rank, step) in offers for rank in range(num_ranks)))
