"""Carries a placement out on Ray: what is free on its nodes, and how an actor is sent to its node. Ray chooses none:
it sorts equal bundles unstably, which put half of all groups of TP4 on two nodes."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megatron_rl.cluster.deadlines import Deadlines
from megatron_rl.cluster.demands import demands_of
from megatron_rl.cluster.placement import Node, Placement, place, place_again
from megatron_rl.cluster.process import Process
from megatron_rl.cluster.profiling import nsight_environment
from megatron_rl.cluster.waiting import explain, settle
from megatron_rl.config.schema import BaseConfig

POOL_LABEL = "pool"
"""The label of a Ray node that names its pool, as in `ray start --labels pool=train`."""

ROLES = ("trainer", "critic", "engine", "teacher", "verifier", "reward_model")
"""What a run consists of, each as the first word of the roles in its placement."""

log = logging.getLogger(__name__)


def read_nodes() -> list[Node]:
    """Ray's nodes that are alive, by address, with what is free on them now."""
    free = available_resources_per_node()
    nodes = [
        Node(
            id=node["NodeID"],
            name=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            free_gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
            pool=node["Labels"].get(POOL_LABEL),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (_natural(node.name), node.id))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that puts 10.0.0.9 before 10.0.0.10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


class RayPlacement:
    """The placement of a run on Ray's nodes. It changes when a group is placed again.

    An actor is bound to its planned node by the node's id, and waits there if a process that has just died has not yet
    given its resources back. Only an engine that spans nodes has a placement group of Ray, where vLLM starts its ranks.
    """

    def __init__(self, config: BaseConfig, roles: Collection[str] = ROLES) -> None:
        """Plan a run on what is free now.

        Args:
            roles: the roles to place.

        Raises:
            ValueError: there is no room.
        """
        self._config = config
        self.plan: Placement = place(
            [demand for demand in demands_of(config) if demand.role.split()[0] in roles], read_nodes()
        )
        self._spanning: dict[tuple[str, int], PlacementGroup] = {}
        self.deadlines = Deadlines(config.cluster.step_timeout_s)
        """The time limits of all processes of the run."""
        self._lock = threading.Lock()
        """Verifiers are started again in their own threads."""
        for role, groups in self.plan.groups.items():
            for index in range(len(groups)):
                self._tell(role, index)

    def rank_options(self, role: str, index: int, rank: int) -> dict[str, Any]:
        """Ray's options for an actor that is one rank of a group."""
        place = self.plan.groups[role][index][rank]
        return _on_node(place.node, place.cpus, place.gpus) | nsight_environment(self._config, role, rank)

    def group_options(self, role: str, index: int) -> dict[str, Any]:
        """Ray's options for an actor that starts the processes of a whole group itself. If the group spans nodes, the
        actor itself reserves nothing, and its current placement group has a bundle for each rank."""
        group = self.plan.groups[role][index]
        if not self.spans_nodes(role, index):
            return _on_node(group[0].node, sum(rank.cpus for rank in group), sum(rank.gpus for rank in group))
        if (role, index) not in self._spanning:
            self._spanning[role, index] = placement_group(
                [{kind: amount for kind, amount in (("CPU", r.cpus), ("GPU", r.gpus)) if amount} for r in group],
                bundle_label_selector=[{"ray.io/node-id": rank.node.id} for rank in group],
            )
        strategy = PlacementGroupSchedulingStrategy(
            self._spanning[role, index], placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}

    def spans_nodes(self, role: str, index: int) -> bool:
        return len({rank.node.id for rank in self.plan.groups[role][index]}) > 1

    def place_again(self, role: str, index: int = 0) -> None:
        """Place a group again, after its processes died; see `placement.place_again`.

        Raises:
            ValueError: there is no room on the nodes that live.
        """
        before = self.plan.groups[role][index]
        self.plan = place_again(self.plan, role, index, read_nodes())
        if self.plan.groups[role][index] != before:
            if (role, index) in self._spanning:
                remove_placement_group(self._spanning.pop((role, index)))
            self._tell(role, index)

    def start_again(
        self, role: str, processes: Mapping[int, Process], create: Callable[[int], Any], timeout_s: float
    ) -> None:
        """Place groups of one dead actor each again, and start their actors. If Ray learns that a node
        is gone only while a new actor waits for it, the group is placed again.

        Args:
            processes: the process of each group, by the group's index; they get the new actors and their locations.
            create: starts the actor of a group in its place.
            timeout_s: the time limit for Ray to start the actors.

        Raises:
            ValueError: there is no room on the nodes that live.
            ProcessLost: Ray did not start an actor in time.
        """
        waiting = list(processes)
        while waiting:
            with self._lock:
                for index in waiting:
                    self.place_again(role, index)
                    processes[index].actor, processes[index].location = create(index), None
            outcomes = settle([processes[index].actor.locate.remote() for index in waiting], timeout_s)
            alive = {node.id for node in read_nodes()}
            homeless = []
            for index, outcome in zip(waiting, outcomes, strict=True):
                if not isinstance(outcome, RayError):
                    processes[index].location = outcome
                elif all(rank.node.id in alive for rank in self.plan.groups[role][index]):
                    raise explain(outcome, processes[index]) from outcome
                else:
                    homeless.append(index)
            waiting = homeless

    def _tell(self, role: str, index: int) -> None:
        names = dict.fromkeys(rank.node.name for rank in self.plan.groups[role][index])
        log.info("%s %d is placed on %s", role, index, ", ".join(names))


def _on_node(node: Node, cpus: float, gpus: float) -> dict[str, Any]:
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}
