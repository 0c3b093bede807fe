"""The transfer plan: which rectangle of which trainer rank goes to which rectangle of which engine rank.

A plan is the intersection of source shards with destination shards, nothing else. Invariants (tests/unit/layout):
every described destination element is written exactly once and from its own source element; among replicas that
hold the same rectangle the least loaded one sends; the plan is a pure function of its inputs, so that both sides
compute it alone and compare `digest`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.layout.families import FAMILIES
from megatron_rl.layout.shards import Box, Shard, intersect, translate, volume
from megatron_rl.types import Mesh, ModelShape


@dataclass(frozen=True, slots=True)
class Copy:
    """One rectangle, on both sides."""

    source_name: str
    source_box: Box
    destination_name: str
    destination_box: Box


@dataclass(frozen=True, slots=True)
class TransferPlan:
    routes: dict[tuple[int, int], tuple[Copy, ...]]
    """(source rank, destination rank) -> copies in wire order. A pair with nothing to send is absent."""

    def num_elements(self, route: tuple[int, int]) -> int:
        return sum(volume(copy.source_box) for copy in self.routes[route])

    @property
    def digest(self) -> str:
        """Equal on both sides, or they do not speak of the same model and meshes."""
        text = repr([(route, copies) for route, copies in sorted(self.routes.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_transfers(sources: Sequence[Sequence[Shard]], destinations: Sequence[Sequence[Shard]]) -> TransferPlan:
    """Plan from one list of shards a source rank to one list of shards a destination rank.

    Raises:
        ValueError: a destination rectangle that the sources hold only in part, or not at all, by name.
    """
    holders: dict[str, dict[Box, list[tuple[int, Shard]]]] = defaultdict(lambda: defaultdict(list))
    for rank, shards in enumerate(sources):
        for shard in shards:
            holders[shard.hf_name][shard.hf_box].append((rank, shard))
    load = [0] * len(sources)
    routes: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    for destination, shards in enumerate(destinations):
        for shard in shards:
            found = 0
            for box, replicas in holders[shard.hf_name].items():
                part = intersect(box, shard.hf_box)
                if part is None:
                    continue
                rank, source = min(replicas, key=lambda replica: (load[replica[0]], replica[0]))
                load[rank] += volume(part)
                found += volume(part)
                routes[rank, destination].append(
                    Copy(
                        source.local_name,
                        translate(part, source.hf_box, source.local_box),
                        shard.local_name,
                        translate(part, shard.hf_box, shard.local_box),
                    )
                )
            if found != volume(shard.hf_box):
                raise ValueError(
                    f"{shard.hf_name} {shard.hf_box}: the sources hold {found} of the {volume(shard.hf_box)} elements "
                    f"that {shard.local_name} on rank {destination} needs"
                )
    return TransferPlan({route: tuple(copies) for route, copies in sorted(routes.items())})


def plan_policy_to_engines(
    shape: ModelShape, mesh: Mesh, *, fused_norms: bool, num_engines: int, engine_tensor: int
) -> TransferPlan:
    """The bridge's plan. Destination rank = engine * engine_tensor + the engine's tensor rank."""
    family = FAMILIES[shape.family]
    sources = [family.megatron_shards(shape, mesh, rank, fused_norms) for rank in range(mesh.world_size)]
    engine = [family.vllm_shards(shape, engine_tensor, rank) for rank in range(engine_tensor)]
    return plan_transfers(sources, engine * num_engines)
