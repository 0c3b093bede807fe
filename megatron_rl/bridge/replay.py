"""Plays a push through: when does each message leave, arrive, and free its buffers?

It follows what sender.py and intake.py do. A rank posts its messages in the global order and has two of them under way.
A receiver has room for two, takes them in order, passes each on to the next engine of its chain, writes it, answers,
and waits for the answer of the next engine. Each direction of a link carries one message at a time, in the global
order. Invariants (tests/unit/bridge): times by hand; no replay is shorter than the time that any link needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_rl.bridge.line import SLOTS
from megatron_rl.bridge.messages import Sized, schedule, split_messages
from megatron_rl.layout import Links, TransferPlan


@dataclass(frozen=True, slots=True)
class Costs:
    """What a message costs beside its bytes."""

    answer_s: float = 1e-4
    """The time from a receiver's answer to the moment at which the sender uses the buffer again."""
    message_s: float = 0.0
    """The time of a processor for each message, at the sender and at each receiver."""


def all_messages(plan: TransferPlan, bucket_bytes: int) -> list[Sized]:
    """All messages of the trainer in the global order."""
    messages = [
        Sized(rank, to, message.number, message.num_bytes)
        for rank in np.unique(plan.source).tolist()
        for to, copies in plan.sent_by(rank).items()
        for message in split_messages(rank, to, copies, bucket_bytes)
    ]
    return schedule(messages, plan.turns)


def replay(messages: Iterable[Sized], plan: TransferPlan, links: Links, costs: Costs = Costs()) -> float:
    """The seconds of a push.

    Args:
        messages: those of `all_messages`.
    """
    num_sources, world = plan.num_sources, plan.engines.world_size
    gpus = [*range(num_sources), *links.gpu(np.arange(plan.num_destinations), num_sources).tolist()]
    free: defaultdict[tuple[str, int], float] = defaultdict(float)
    """When each direction of each link has sent its last message."""
    posted, released, completed = ([0.0] * len(gpus) for _ in range(3))
    """The times at which each rank has posted its last message, can post the one after the next, and has completed the
    last message that it received."""
    before_posted, before_completed = list(released), list(completed)
    """The same for the message before the last: with two buffers, these are the ones that count."""
    assert SLOTS == 2
    chains = {chain[0]: list(chain) for chain in plan.engines.chains}
    last = 0.0
    for message in messages:
        engine, within = divmod(message.destination, world)
        hops = [message.source, *(num_sources + one * world + within for one in chains[engine])]
        at = 0.0
        written: list[float] = []
        for sender, receiver in zip(hops, hops[1:]):
            post = max(at, posted[sender], before_posted[sender]) + costs.message_s
            posted[sender] = post
            out, into, rate = _link(gpus[sender], gpus[receiver], links)
            begin = max(post, before_completed[receiver], free[out], free[into])
            end = begin + message.num_bytes / rate
            free[out] = free[into] = end
            at = max(end, completed[receiver])
            written.append(at + costs.message_s)
        # From the end of the chain to its head: a receiver goes on when the next one has answered.
        answer = 0.0
        for sender, receiver, done in reversed(list(zip(hops, hops[1:], written))):
            before_completed[receiver], completed[receiver] = completed[receiver], max(done, answer)
            answer = done + costs.answer_s
            before_posted[sender], released[sender] = released[sender], answer
            last = max(last, completed[receiver])
    return last


def _link(sender: int, receiver: int, links: Links) -> tuple[tuple[str, int], tuple[str, int], float]:
    """Both ends of the link between two GPUs, and its bytes per second."""
    if links.node(sender) == links.node(receiver):
        return ("NVLink out of", sender), ("NVLink into", receiver), links.nvlink_bytes_per_s
    return ("NIC out of", links.nic(sender)), ("NIC into", links.nic(receiver)), links.nic_bytes_per_s
