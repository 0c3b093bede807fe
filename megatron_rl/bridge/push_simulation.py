"""Simulates a push: when does each stretch leave, arrive, and free its buffers?

It follows what sender.py and intake.py do. A rank posts its stretches in the global order and has two of them in
flight. A receiver has room for two, takes them in order, passes each on to the next engine of its chain, writes it,
answers, and waits for the answer of the next engine to the stretch before. Each direction of a link carries one stretch
at a time, in the global order. Invariants (tests/unit/bridge): times by hand; no replay is shorter than the time that
any link needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_rl.bridge.line import SLOTS
from megatron_rl.bridge.messages import Message, schedule, split_messages, stretches
from megatron_rl.layout import Links, TransferPlan


@dataclass(frozen=True, slots=True)
class Costs:
    """What a message costs in addition to its bytes."""

    answer_s: float = 1e-4
    """The time from a receiver's answer to the moment at which the sender posts the stretch after the next one."""
    message_s: float = 0.0
    """The time of a processor for each message, at the sender and at each receiver."""


class StretchSize(NamedTuple):
    """A stretch without its contents."""

    source: int
    destination: int
    num_bytes: int
    num_messages: int


def all_stretches(plan: TransferPlan, bucket_bytes: int) -> list[StretchSize]:
    """All stretches of the trainer in the global order. A message with one copy is sent without packing, unless
    engines feed engines."""
    chained = plan.engines.are_chained
    runs: dict[int, list[StretchSize]] = {}
    for rank in np.unique(plan.source).tolist():
        messages = [
            message
            for to, copies in plan.sent_by(rank).items()
            for message in split_messages(rank, to, copies, bucket_bytes)
        ]
        for number, turn in schedule(messages, plan.turns).items():
            runs[number] = [
                StretchSize(rank, part[0].destination, sum(message.num_bytes for message in part), len(part))
                for part in stretches(turn, lambda message: chained or len(message.copies) > 1, bucket_bytes)
            ]
    return [run for number in sorted(runs) for run in runs[number]]


def most_incomplete_bytes(plan: TransferPlan, bucket_bytes: int) -> int:
    """The most bytes that a rank of an engine holds of modules that are not complete on all ranks of the engine: what a
    push holds a second time if vLLM repacks every module. Engines that other engines feed hold about as much."""
    turns: dict[int, list[Message]] = {}
    for rank in np.unique(plan.source).tolist():
        for to, copies in plan.sent_by(rank).items():
            turns |= schedule(split_messages(rank, to, copies, bucket_bytes), plan.turns)
    world, sizes, last = plan.engines.world_size, Counter[tuple[int, str]](), {}
    arrivals = [(turns[number][0].destination, _modules(turns[number])) for number in sorted(turns)]
    for index, (rank, modules) in enumerate(arrivals):
        for module, num_bytes in modules.items():
            sizes[rank, module] += num_bytes
            last[rank // world, module] = index
    held, most = Counter[int](), 0
    begun: set[tuple[int, str]] = set()
    ending: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for ended, index in last.items():
        ending[index].append(ended)
    for index, (rank, modules) in enumerate(arrivals):
        for module in modules:
            if (rank, module) not in begun:
                begun.add((rank, module))
                held[rank] += sizes[rank, module]
        most = max(most, held[rank])
        for engine, module in ending[index]:
            for other in range(engine * world, (engine + 1) * world):
                held[other] -= sizes[other, module]
    return most


def _modules(messages: Iterable[Message]) -> Counter[str]:
    """The bytes that messages bring to each module."""
    found = Counter[str]()
    for copied in (copied for message in messages for copied in message.copies):
        found[copied.destination_name.rpartition(".")[0]] += copied.num_bytes
    return found


def replay(order: Iterable[StretchSize], plan: TransferPlan, links: Links, costs: Costs = Costs()) -> float:
    """The seconds of a push.

    Args:
        order: the order of `all_stretches`.
    """
    num_sources, world = plan.num_sources, plan.engines.world_size
    gpus = [*range(num_sources), *links.gpu(np.arange(plan.num_destinations), num_sources).tolist()]
    free: defaultdict[tuple[str, int], float] = defaultdict(float)
    """When each direction of each link has sent its last message."""
    posted, released, completed, answered = ([0.0] * len(gpus) for _ in range(4))
    """The times at which each rank has posted its last stretch, can post the one after the next, has completed the last
    stretch that it received, and has the answer to the last one that it passed on."""
    before_posted, before_completed = list(released), list(completed)
    """The same for the stretch before the last: with two buffers, these are the ones that count."""
    assert SLOTS == 2
    chains = {chain[0]: list(chain) for chain in plan.engines.chains}
    last = 0.0
    for run in order:
        engine, within = divmod(run.destination, world)
        hops = [run.source, *(num_sources + one * world + within for one in chains[engine])]
        at, work_s = 0.0, run.num_messages * costs.message_s
        for sender, receiver in zip(hops, hops[1:], strict=False):
            post = max(at, posted[sender], before_posted[sender]) + work_s
            posted[sender] = post
            out, into, rate = _link(gpus[sender], gpus[receiver], links)
            begin = max(post, before_completed[receiver], free[out], free[into])
            end = begin + run.num_bytes / rate
            free[out] = free[into] = end
            at = max(end, completed[receiver])
            written = at + work_s
            # The receiver goes on when the next one has answered the stretch before.
            before_completed[receiver], completed[receiver] = completed[receiver], max(written, answered[receiver])
            answered[sender] = written + costs.answer_s
            before_posted[sender], released[sender] = released[sender], answered[sender]
            last = max(last, written)
    return last


def _link(sender: int, receiver: int, links: Links) -> tuple[tuple[str, int], tuple[str, int], float]:
    """Both ends of the link between two GPUs, and its bytes per second."""
    if links.node(sender) == links.node(receiver):
        return ("NVLink out of", sender), ("NVLink into", receiver), links.nvlink_bytes_per_s
    return ("NIC out of", links.nic(sender)), ("NIC into", links.nic(receiver)), links.nic_bytes_per_s
