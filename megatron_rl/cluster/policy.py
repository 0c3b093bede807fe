"""The policy as a group of Ray actors, one Megatron rank each; implements `ports.Policy` for the loop.

The driver sends each rank the indices of its own samples and references to their tokens. The tokens go from the engine
to the rank through Ray's object store. All ranks run each call at the same time, because they meet in collectives.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megatron_rl.actor.packing import TrainSample
from megatron_rl.actor.spec import ActorSpec
from megatron_rl.bridge.sender import BridgeSender
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.process import Location, Process, begin_process, locate
from megatron_rl.cluster.waiting import gather, locate_all
from megatron_rl.config.schema import ClusterConfig
from megatron_rl.ports import PolicyLost
from megatron_rl.types import Batch, Denominators, Mesh, Metrics, MicrobatchPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assigned:
    """A sample that is assigned to a rank: where its tokens are, and its numbers."""

    group: int
    """The index of its group's payload among those that the rank gets."""
    index_in_group: int
    numbers: dict[str, Any]
    """The other fields of its `TrainSample`."""


Assignment = list[list[list[Assigned]]]
"""The samples of one data-parallel rank, as [mini-batch][micro-batch][sample]."""


class TrainerRank:
    """The process of one Megatron rank."""

    def __init__(self, spec: ActorSpec, rank: int, logs: str) -> None:
        begin_process(Path(logs) / f"trainer_{rank}.log", f"trainer rank {rank}")
        self.spec, self.rank = spec, rank
        self.sender: BridgeSender | None = None

    def locate(self) -> Location:
        return locate()

    def address(self) -> str:
        """An address with a free port on this node, at which the ranks will meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, init_method: str) -> bool:
        """Build and load this rank's part of the model. Returns whether it has Transformer Engine's fused norms."""
        # Only the ranks import this: the driver does not need Megatron-Core and need not wait for its import.
        from megatron_rl.actor.actor import MegatronActor
        from megatron_rl.actor.weights import load_hf

        self.actor = MegatronActor(
            self.spec, rank=self.rank, world_size=self.spec.policy.parallel.mesh.world_size, init_method=init_method
        )
        log.info("loading its part of %s", self.spec.model.path)
        start = time.perf_counter()
        load_hf(self.actor, self.spec.model.path)
        self.actor.keep_reference()
        log.info("loaded in %.1f s", time.perf_counter() - start)
        return self.actor.fused_norms

    def begin(
        self, assignment: Assignment, payloads: list[Any], denominators: list[Denominators], alignment: int
    ) -> Metrics:
        references = [p for p in payloads if isinstance(p, ray.ObjectRef)]
        fetched = dict(zip(references, ray.get(references), strict=True))
        tokens = [fetched[p] if isinstance(p, ray.ObjectRef) else p for p in payloads]
        minibatches = [
            [[TrainSample(tokens=tokens[s.group][s.index_in_group], **s.numbers) for s in micro] for micro in mini]
            for mini in assignment
        ]
        start = time.perf_counter()
        metrics = self.actor.begin(minibatches, denominators, alignment)
        num_samples = sum(len(micro) for mini in minibatches for micro in mini)
        log.info("took %d samples of a step in %.2f s", num_samples, time.perf_counter() - start)
        return metrics

    def update(self, minibatch: int, coefficients: Mapping[str, float]) -> Metrics:
        start = time.perf_counter()
        metrics = self.actor.update(minibatch, coefficients)
        seconds = time.perf_counter() - start
        norm = metrics["grad_norm"]
        log.info("update %d: loss %.6g, gradient norm %.6g, %.2f s", minibatch, metrics["loss"], norm, seconds)
        return metrics

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        log.info("writing the checkpoint %s", folder)
        self.actor.save(Path(folder), extra)

    def load(self, folder: str) -> dict[str, Any]:
        log.info("reading the checkpoint %s", folder)
        return self.actor.load(Path(folder))

    def export_hf(self, folder: str) -> None:
        from megatron_rl.actor.weights import export_hf

        log.info("writing the Hugging Face folder %s", folder)
        export_hf(self.actor, Path(folder))

    def connect(self, setup: BridgeSetup) -> None:
        if self.sender is not None:
            self.sender.close()
        self.sender = BridgeSender(setup, self.rank, self.actor.parameters())

    def push(self, version: int, verify: bool) -> Metrics:
        return self.sender.push(version, verify)


class PolicyGroup:
    """All ranks of the policy."""

    def __init__(self, spec: ActorSpec, cluster: ClusterConfig, logs: Path, placement: RayPlacement) -> None:
        """Start the processes on their nodes."""
        self.mesh: Mesh = spec.policy.parallel.mesh
        self._cluster = cluster
        remote = ray.remote(TrainerRank)
        self.ranks = [
            remote.options(**placement.rank_options("trainer", 0, rank)).remote(spec, rank, str(logs))
            for rank in range(self.mesh.world_size)
        ]
        self.processes = [
            Process(f"trainer rank {rank}", logs / f"trainer_{rank}.log", actor)
            for rank, actor in enumerate(self.ranks)
        ]

    def start(self) -> None:
        """Connect the ranks and load the model. It is not part of the constructor, so that the engines can start at the
        same time."""
        timeout_s = self._cluster.start_timeout_s
        needs = f"{self._cluster.cpus_per_trainer:g} CPU and {self._cluster.gpus_per_trainer:g} GPU"
        locate_all(self.processes, timeout_s, needs)
        address = gather([self.ranks[0].address.remote()], self.processes[:1], "to find a port", timeout_s)[0]
        calls = [rank.start.remote(address) for rank in self.ranks]
        self.fused_norms: bool = gather(calls, self.processes, "to load the model", timeout_s)[0]

    def begin(self, batch: Batch, plan: MicrobatchPlan) -> Metrics:
        assigned, payloads = [], []
        for data_rank in range(self.mesh.data):
            one, groups = _assign(batch, plan, data_rank)
            assigned.append(one)
            payloads.append(groups)
        calls = []
        for rank, trainer in enumerate(self.ranks):
            data_rank = self.mesh.coordinates(rank)[2]
            calls.append(
                trainer.begin.remote(assigned[data_rank], payloads[data_rank], list(plan.denominators), plan.alignment)
            )
        return self._gather(calls, "to compute log-probs")

    def update(self, minibatch: int, coefficients: Mapping[str, float]) -> Metrics:
        return self._all("update", "to update", minibatch, coefficients)

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        self._all("save", "to write a checkpoint", str(folder.absolute()), extra)

    def load(self, folder: Path) -> dict[str, Any]:
        return self._all("load", "to read a checkpoint", str(folder.absolute()))

    def export_hf(self, folder: Path) -> None:
        self._all("export_hf", "to export the model", str(folder.absolute()))

    def _all(self, method: str, doing: str, *arguments: Any) -> Any:
        """Call a method on all ranks; see `_gather`."""
        return self._gather([getattr(rank, method).remote(*arguments) for rank in self.ranks], doing)

    def _gather(self, calls: Sequence[ray.ObjectRef], doing: str) -> Any:
        """The ranks' common answer. They also agree on a ValueError.

        Raises:
            ValueError: the ranks raised it.
            PolicyLost: any other error occurred. Some ranks may then be inside a collective for ever.
        """
        try:
            return gather(calls, self.processes, doing, self._cluster.step_timeout_s)[0]
        except RuntimeError as error:
            raise PolicyLost(str(error)) from error


def _assign(batch: Batch, plan: MicrobatchPlan, data_rank: int) -> tuple[Assignment, list[Any]]:
    """The samples of a data-parallel rank, and the payloads of the groups that they belong to."""
    position: dict[int, int] = {}
    payloads: list[Any] = []

    def assign(sample: int) -> Assigned:
        group = int(batch.group_of[sample])
        if group not in position:
            position[group] = len(payloads)
            payloads.append(batch.groups[group].payload)
        index = int(batch.index_in_group[sample])
        numbers = {
            "name": f"{batch.groups[group].prompt.uid}, answer {index}",
            "advantage": float(batch.advantages[sample]),
            "weight": float(batch.weights[sample]),
            "index": int(sample),
            "version": batch.version,
        }
        return Assigned(position[group], index, numbers)

    assignment = [[[assign(s) for s in micro] for micro in mini[data_rank]] for mini in plan.minibatches]
    return assignment, payloads
