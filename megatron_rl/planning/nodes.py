"""The memory of a node: what all of its ranks keep in it together, besides what is on their GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import BaseConfig, GrpoRunConfig

READ_BYTES_PER_S = 2e9
"""The rate at which a node is taken to read weights from a file system that all nodes read at once: an assumption."""
START_S = 20.0
"""What importing the packages is taken to need. vLLM's import took as long on the machine of one H100."""
ENGINE_S = 9.0
"""What an engine needs besides until it is ready, without the time of reading: 9 s with 135M parameters on an H100."""
REMEDIES = {
    "mirrors": "set cluster.mirror to false",
    "optimizer state": "set policy.optimizer.offload to false, or give the trainer more GPUs",
}
"""What makes a part smaller, by the end of its name. More GPUs of the trainer make any other part smaller."""


@dataclass(frozen=True, slots=True)
class NodeSide:
    """The ranks of one role."""

    name: str
    """One of them, in a sentence."""
    ranks: int
    """The largest number of them on a node."""
    host: Mapping[str, float]
    """The bytes that one of them keeps in the memory of its node, by what they are."""

    @property
    def rank_bytes(self) -> float:
        return sum(self.host.values())


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """What the ranks of a run keep in the memory of their nodes."""

    sides: Sequence[NodeSide]
    """The roles that keep anything there."""
    fullest: Sequence[tuple[NodeSide, int]]
    """The roles on the fullest node, with the numbers of their ranks there."""
    limit: float | None
    """The bytes that a node has for them; None if it is not checked."""

    @property
    def bytes(self) -> float:
        """What the ranks of the fullest node need together."""
        return sum(number * side.rank_bytes for side, number in self.fullest)

    @property
    def problem(self) -> str | None:
        if self.limit is None or self.bytes <= self.limit:
            return None
        parts = [(number * size, part, side.name) for side, number in self.fullest for part, size in side.host.items()]
        size, largest, name = max(parts)
        remedy = next((REMEDIES[end] for end in REMEDIES if largest.endswith(end)), "give the trainer more GPUs")
        return (
            f"the ranks of a node need {self.bytes / 1e9:,.0f} GB of its memory, and cluster.node_memory_gb is "
            f"{self.limit / 1e9:,.0f}; {size / 1e9:,.0f} GB are {largest} of {name}; {remedy}"
        )


def node_memory(config: BaseConfig, hosts: Mapping[str, Mapping[str, float]]) -> NodeMemory:
    """
    Args:
        hosts: the bytes that one rank keeps in the memory of its node, by role and by what they are. Only engines that
            share their GPUs keep any.
    """
    cluster = config.cluster
    engines = critics = 0
    if isinstance(config, GrpoRunConfig):
        engines = config.rollout.num_engines * config.rollout.engine_ranks
        critics = config.critic.parallel.mesh.world_size if config.critic else 0
    trainers = config.policy.parallel.mesh.world_size
    known = {
        "trainer": ("a trainer rank", trainers, cluster.gpus_per_trainer),
        "critic": ("a critic's rank", critics, cluster.gpus_per_trainer),
        "engine": ("an engine's rank", engines, cluster.gpus_per_engine_rank),
    }
    sides = []
    for role, (name, number, gpus) in known.items():
        if host := hosts.get(role):
            if cluster.gpus_per_node and gpus:
                number = min(int(cluster.gpus_per_node // gpus), number)
            elif role != "engine":
                number = 1
            sides.append(NodeSide(name, number, host))
    limit = cluster.node_memory_gb
    return NodeMemory(sides, _fullest(config, sides), None if limit is None else limit * 1e9)


def _fullest(config: BaseConfig, sides: Sequence[NodeSide]) -> list[tuple[NodeSide, int]]:
    """The ranks of the fullest node. Ranks that share GPUs are all there. Otherwise the ranks that keep the most are
    there, and others on the GPUs that are left, if they may use the same nodes."""
    cluster = config.cluster
    if cluster.colocate or not (cluster.gpus_per_node and cluster.gpus_per_trainer):
        return [(side, side.ranks) for side in sides]
    by_size = sorted(sides, key=lambda side: side.rank_bytes, reverse=True)
    if cluster.pools.get("trainer") != cluster.pools.get("critic"):
        by_size = by_size[:1]
    free, found = int(cluster.gpus_per_node // cluster.gpus_per_trainer), []
    for side in by_size:
        found.append((side, min(free, side.ranks)))
        free -= found[-1][1]
    return found


def least_loading_seconds(config: BaseConfig, num_bytes: float) -> float:
    """An estimate of the shortest start: packages are imported, and each node reads its part of the weights. A replica
    of the trainers reads them all, and so does an engine.

    Args:
        num_bytes: the size of the model's weights.
    """
    mesh = config.policy.parallel.mesh
    gpus = config.cluster.gpus_per_node or mesh.world_size
    readers = [mesh.world_size // mesh.data]
    start_s = START_S
    if isinstance(config, GrpoRunConfig) and config.cluster.gpus_per_engine_rank:
        readers.append(config.rollout.engine_ranks)
        start_s += ENGINE_S
    return start_s + num_bytes / max(1.0, min(readers) / gpus) / READ_BYTES_PER_S
