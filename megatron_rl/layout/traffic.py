"""Computes how many bytes a plan sends over each link, and how long that takes at least.

Every GPU has a port to the other GPUs of its node (NVLink) and a NIC, which it may share. Each of these works in both
directions at once. Bytes that stay on a GPU use neither. Invariants (tests/unit/layout): the bytes on GPUs, NVLink and
NICs add up to what the engines need; the least time of the links is not below the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_rl.layout.links import Links
from megatron_rl.layout.transfer import TransferPlan

CHAIN_SHARE = 0.2
"""How much longer than with the best number of chains a push may take. More chains are shorter."""


@dataclass(frozen=True, slots=True)
class Traffic:
    device_bytes: int
    """Bytes that stay on their GPU."""
    nvlink_bytes: int
    """Bytes that pass between the GPUs of a node."""
    nic_bytes: int
    """Bytes that pass between nodes."""
    received_bytes: int
    """Bytes that all engines together receive: the sum of the three above."""
    needed_bytes: int
    """Bytes that all engines together hold."""
    busiest_link: str
    busiest_link_bytes: int
    busiest_sender_bytes: int
    """Bytes that the busiest of all trainer ranks sends."""
    num_rounds: int
    """The number of engines in the longest chain."""
    bound_s: float
    """A lower bound of the time: the bytes of the fullest engine rank divided by the rate of its link."""
    least_s: float
    """The least time of all links: the time of the busiest link, plus the time of one bucket in each further round."""

    @property
    def redundancy(self) -> float:
        return self.received_bytes / self.needed_bytes


def traffic(plan: TransferPlan, links: Links, bucket_bytes: int) -> Traffic:
    """Add up a plan's bytes for each link. An engine in a chain passes each bucket on as soon as it has arrived."""
    source, destination, num_bytes = _hops(plan)
    gpu = links.gpu(destination, plan.num_sources)
    sender = np.where(source < plan.num_sources, source, links.gpu(source - plan.num_sources, plan.num_sources))
    inside = links.node(sender) == links.node(gpu)
    stays, far = sender == gpu, ~inside
    near = inside & ~stays
    num_gpus = int(max(gpu.max(), sender.max())) + 1
    loads = {
        "NIC out of": np.bincount(links.nic(sender)[far], num_bytes[far], num_gpus),
        "NIC into": np.bincount(links.nic(gpu)[far], num_bytes[far], num_gpus),
        "NVLink out of": np.bincount(sender[near], num_bytes[near], num_gpus),
        "NVLink into": np.bincount(gpu[near], num_bytes[near], num_gpus),
    }
    rates = {name: links.nic_bytes_per_s if "NIC" in name else links.nvlink_bytes_per_s for name in loads}
    seconds = {name: float(load.max()) / rates[name] for name, load in loads.items()}
    busiest = max(seconds, key=lambda name: seconds[name])
    by_nic = np.bincount(destination[far], num_bytes[far], plan.num_destinations)
    by_nvlink = np.bincount(destination[near], num_bytes[near], plan.num_destinations)
    rounds = max((feed.round for feed in plan.engines.feeds), default=0)
    return Traffic(
        device_bytes=int(num_bytes[stays].sum()),
        nvlink_bytes=int(num_bytes[near].sum()),
        nic_bytes=int(num_bytes[far].sum()),
        received_bytes=int(num_bytes.sum()),
        needed_bytes=int(plan.held_bytes(plan.regions.destination).sum()) * plan.engines.num,
        busiest_link=_name(busiest, int(loads[busiest].argmax()), plan, links),
        busiest_link_bytes=int(loads[busiest].max()),
        busiest_sender_bytes=int(plan.sent_bytes.max()),
        num_rounds=rounds + 1,
        bound_s=max(by_nic.max() / links.nic_bytes_per_s, by_nvlink.max() / links.nvlink_bytes_per_s),
        least_s=seconds[busiest] + rounds * bucket_bytes / links.nic_bytes_per_s,
    )


def _hops(plan: TransferPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (sender, destination rank, bytes) of all runs and all feeds. Senders are numbered with the trainer ranks
    first."""
    world = plan.engines.world_size
    ranks = np.arange(world)
    feeds = np.array([(feed.source, feed.destination) for feed in plan.engines.feeds], np.int64).reshape(-1, 2) * world
    fed_by, fed = ((feeds[:, i, None] + ranks).ravel() for i in (0, 1))
    return (
        np.concatenate([plan.source.astype(np.int64), plan.num_sources + fed_by]),
        np.concatenate([plan.destination.astype(np.int64), fed]),
        np.concatenate([plan.bytes.astype(float), np.tile(plan.engine_bytes, len(feeds))]),
    )


def _name(link: str, index: int, plan: TransferPlan, links: Links) -> str:
    if link.startswith("NIC"):
        index *= links.gpus_per_node // (links.nics_per_node or links.gpus_per_node)
    if links.colocated:
        return f"{link} GPU {index}"
    if index < plan.num_sources:
        return f"{link} trainer rank {index}"
    engine, rank = divmod(index - plan.num_sources, plan.engines.world_size)
    return f"{link} engine {engine} rank {rank}"


def choose_chains(sender_s: float, receiver_s: float, num_engines: int, bucket_s: float) -> int:
    """The number of chains. Few chains use the trainer's links less, many chains are shorter. It is the largest number
    whose time is within CHAIN_SHARE of the best one, because an engine that is late to a push holds all engines behind
    it in its chain.

    Args:
        sender_s: the busiest trainer link's time for one engine; it grows with the number of chains.
        receiver_s: the busiest engine link's time.
        bucket_s: one bucket's time from engine to engine.
    """

    def predicted(chains: int) -> float:
        return max(chains * sender_s, receiver_s) + (-(-num_engines // chains) - 1) * bucket_s

    times = {chains: predicted(chains) for chains in range(1, num_engines + 1)}
    return max(chains for chains, seconds in times.items() if seconds <= (1 + CHAIN_SHARE) * min(times.values()))
