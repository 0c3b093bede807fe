"""How ranks with the same weights share the sending.

All bytes that the same set of replicas can send are put in one sequence, engine by engine. The replicas share it: each
of them sends one interval of it, so that the links carry equal loads. Invariant (tests/unit/layout): of a workload
every byte has one sender, which is nearest to its receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.layout.copies import WIDTHS
from megatron_rl.layout.engines import Engines
from megatron_rl.layout.links import Links
from megatron_rl.layout.regions import Regions


@dataclass(frozen=True)
class Stream:
    """All items in the order of their pairs, with their sizes in bytes."""

    items: np.ndarray
    bytes: np.ndarray
    row_bytes: np.ndarray
    offset: np.ndarray
    """The number of bytes of the item's pair before the item."""
    first: np.ndarray
    """[num_pairs + 1]: the index of each pair's first item."""
    group: np.ndarray
    """[num_pairs]: the group of source ranks of each pair."""
    rank: np.ndarray
    """[num_pairs]: the rank of the engine that receives the pair."""
    pair_bytes: np.ndarray

    @classmethod
    def of(cls, regions: Regions, dtype: str) -> Stream:
        group = regions.groups[1][regions.item_block].astype(np.int64)
        side = regions.destination
        rank = side.held[regions.item_held, 0]
        width = np.array([WIDTHS[cut.wire_dtype(dtype)] for cut in side.cuts], np.int64)
        lengths = regions.boxes[..., 1] - regions.boxes[..., 0]
        width = width[side.held[regions.item_held, 3]]
        num_bytes = lengths.prod(axis=1)[regions.item_box] * width
        row_bytes = lengths[:, 2:].prod(axis=1)[regions.item_box] * width
        order = np.lexsort((rank, group))
        key = (group * (int(rank.max(initial=0)) + 1) + rank)[order]
        _, first = np.unique(key, return_index=True)
        num_bytes = num_bytes[order]
        end = np.append(0, np.cumsum(num_bytes))
        first = np.append(first, len(order))
        pair = np.repeat(np.arange(len(first) - 1), np.diff(first))
        return cls(
            order,
            num_bytes,
            row_bytes[order],
            end[:-1] - end[first][pair],
            first,
            group[order][first[:-1]],
            rank[order][first[:-1]],
            np.diff(end[first]),
        )


@dataclass(frozen=True)
class Workloads:
    """Segments in sequence. A segment is a pair's stream for one engine. A workload is a series of consecutive segments
    that the same source ranks share among themselves."""

    pair: np.ndarray
    destination: np.ndarray
    end: np.ndarray
    """[num_segments + 1]: the number of bytes before each segment, counted over all workloads."""
    first: np.ndarray
    """[num_workloads + 1]: the first segment of each workload."""
    members: list[np.ndarray]
    """The source ranks that share each workload."""
    near: np.ndarray
    """[num_workloads]: whether the senders are in the receiver's node."""


def group_segments(
    stream: Stream,
    groups: Sequence[Sequence[int]],
    num_sources: int,
    engines: Engines,
    links: Links,
) -> Workloads:
    """Decide which ranks of a group may send each segment, and put segments with the same senders into one workload.
    The sender is the rank on the receiver's GPU; if there is none, the ranks in its node; otherwise all ranks."""
    num_pairs = len(stream.group)
    heads = np.array([chain[0] for chain in engines.chains], np.int64)
    pair = np.tile(np.arange(num_pairs), len(heads))
    destination = np.repeat(heads, num_pairs) * engines.world_size + stream.rank[pair]
    gpu = links.gpu(destination, num_sources)
    num_gpus = max(int(gpu.max(initial=0)) + 1, num_sources)
    ranks = np.array([rank for group in groups for rank in group], np.int64)
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    group, node = stream.group[pair], links.node(gpu)
    same_node = np.isin(group * num_gpus + node, np.unique(group_of * num_gpus + links.node(ranks)))
    same_gpu = np.isin(group * num_gpus + gpu, group_of * num_gpus + ranks)
    place = np.where(same_gpu, 1 + num_gpus + gpu, np.where(same_node, 1 + node, 0))
    key = group * (1 + 2 * num_gpus) + place
    order = np.lexsort((pair, destination, key))
    _, first = np.unique(key[order], return_index=True)
    members = []
    for segment in order[first].tolist():
        senders = np.array(groups[group[segment]], np.int64)
        if same_gpu[segment]:
            senders = senders[senders == gpu[segment]]
        elif same_node[segment]:
            senders = senders[links.node(senders) == node[segment]]
        members.append(senders)
    return Workloads(
        pair[order],
        destination[order],
        np.append(0, np.cumsum(stream.pair_bytes[pair[order]])),
        np.append(first, len(order)),
        members,
        same_node[order[first]],
    )


def share_out(workloads: Workloads, num_sources: int, links: Links) -> tuple[np.ndarray, np.ndarray]:
    """Divide every workload among its members. Returns (first byte of each part, its sender), over all workloads.

    Workloads with the fewest members come first. Each further one is given to the links that carry least so far.
    """
    nic_load = np.zeros(num_sources, np.int64)
    rank_load = np.zeros((2, num_sources), np.int64)  # [0]: bytes over NICs, [1]: bytes inside nodes
    parts: list[np.ndarray] = [np.zeros(0, np.int64)] * len(workloads.members)
    bounds = workloads.end[workloads.first].tolist()
    for i in sorted(range(len(workloads.members)), key=lambda i: len(workloads.members[i])):
        members, near = workloads.members[i], int(workloads.near[i])
        load = rank_load[near]
        num_bytes = bounds[i + 1] - bounds[i]
        nic, index = np.unique(members if near else links.nic(members), return_inverse=True)
        if len(nic) == len(members):  # no two members share a link
            part = fill_up((load if near else nic_load)[nic], num_bytes)
        else:
            part = np.empty(len(members), np.int64)
            for j, quota in enumerate(fill_up(nic_load[nic], num_bytes).tolist()):
                part[index == j] = fill_up(load[members[index == j]], quota)
        load[members] += part
        if not near:
            np.add.at(nic_load, links.nic(members), part)
        parts[i] = bounds[i] + np.cumsum(part) - part
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *parts]), np.concatenate([empty, *workloads.members])


def fill_up(load: np.ndarray, amount: int) -> np.ndarray:
    """Divide `amount` into whole numbers so that the smallest entries of `load` + result become equal (water
    filling)."""
    order = np.argsort(load, kind="stable")
    sums = np.cumsum(load[order])
    level = (amount + sums) // np.arange(1, len(load) + 1)
    count = int(np.flatnonzero(level >= load[order])[-1]) + 1
    poured = np.zeros_like(load)
    poured[order[:count]] = level[count - 1] - load[order[:count]]
    poured[order[: amount - int(poured.sum())]] += 1  # the remainder is less than `count`
    return poured
