"""Groups of Ray actors, one Megatron rank each: what the groups of policy and critic have in common.

All ranks of a group run each call at the same time, because they meet in collectives.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError
from torch.distributed import PrefixStore, TCPStore

from megatron_rl.actor.spec import ActorSpec
from megatron_rl.algorithms.passes import Column
from megatron_rl.bridge.join import host_store
from megatron_rl.cluster.mirror import Mirrors, fetch_state, send_state, whole_steps
from megatron_rl.cluster.network import find_interface
from megatron_rl.cluster.nodes import RayPlacement
from megatron_rl.cluster.payloads import fetch, fetch_numbers
from megatron_rl.cluster.process import Location, Process, begin_process, locate
from megatron_rl.cluster.process_trace import TracedProcess
from megatron_rl.cluster.waiting import ProcessLost, explain, gather, locate_all, settle
from megatron_rl.config.cluster import ALLOCATOR_VARIABLES, ClusterConfig
from megatron_rl.config.machine import num_cores, start_in_turn
from megatron_rl.loop.shares import with_columns
from megatron_rl.ports import PolicyLost
from megatron_rl.processes import starting
from megatron_rl.types import Mesh, Metrics, Phase, Share, TokenNumbers

if TYPE_CHECKING:
    from megatron_rl.actor.trainer import MegatronTrainer

log = logging.getLogger(__name__)

IMPORTS = ("megatron_rl.actor.actor", "megatron_rl.actor.weights")  # they bring all that a rank imports

DEATH_S = 3.0
"""The time that Ray gets to notice the death of a rank after another rank's error."""


class MegatronRank(TracedProcess, ABC):
    """The process of one Megatron rank.

    Args:
        role: `trainer` or `critic`.
    """

    def __init__(self, spec: ActorSpec, rank: int, logs: str, role: str) -> None:
        begin_process(Path(logs) / f"{role}_{rank}.log", f"{role} rank {rank}")
        self.spec, self.rank, self.role = spec, rank, role
        self.place = f"pipeline stage {spec.policy.parallel.mesh.coordinates(rank)[1]}"
        self.actor: Any = None

    @abstractmethod
    def build(self, store: Any) -> MegatronTrainer:
        """This rank's part of the model, after the ranks have met over the store."""

    def locate(self) -> Location:
        return locate()

    def fetched(self, share: Share) -> Share:
        """The share with the tokens and the columns that it refers to."""
        names = share.columns if self.actor.is_last_stage else ()
        columns = {name: fetch_numbers(share.columns[name]) for name in names}
        return replace(share, tokens=fetch(share.tokens, with_routes=True), columns=columns)

    def take(self, share: Share) -> None:
        """Take the samples of a later epoch of the step."""
        self.actor.take(self.fetched(share))

    def columns(self, names: Sequence[Column]) -> dict[Column, ray.ObjectRef] | None:
        """A reference to each column of the rank's samples (`MegatronTrainer.columns`); None if it has none."""
        columns = self.actor.columns(names)
        return {name: ray.put(numbers) for name, numbers in columns.items()} if any(columns.values()) else None

    def serve(self) -> tuple[str, int]:
        """Serve the store over which the ranks will meet, and return its address and port."""
        address = find_interface(os.environ).address
        self.store = host_store(address)
        return address, self.store.port

    def prepare(self, gpu: str | None) -> None:
        """Import Megatron-Core, and what is built on it. The driver does without them, and does not wait for them.

        Args:
            gpu: the GPU that the rank shares with an engine; None if it has what Ray gave it.
        """
        if all(name in sys.modules for name in IMPORTS):
            return
        if gpu is not None:  # CUDA reads this when it starts, which an import may do
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        else:
            let_segments_grow(os.environ)
        start = time.perf_counter()
        with starting(), importlib.import_module("megatron_rl.actor.platform").importing():
            for name in IMPORTS:
                importlib.import_module(name)
        log.info("imported Megatron-Core in %.1f s", time.perf_counter() - start)

    def start(self, address: str, port: int, secret: str, load_model: bool) -> bool:
        """Build this rank's part of the model, after `prepare`.

        Args:
            address, port: the address of the store that rank 0 serves.
            secret: a part of the names of all keys in the store, so that no process of another run reads or changes
                them.
            load_model: load the weights that the run begins with. Otherwise `load` must follow.

        Returns:
            Whether it has Transformer Engine's fused norms.
        """
        from megatron_rl.actor.adapter_folders import load_adapters
        from megatron_rl.actor.weights import load_weights

        with starting():
            store = PrefixStore(f"megatron_rl/{secret}/trainers", TCPStore(address, port, is_master=False))
            self.actor = self.build(store)
        has_adapters = self.spec.shape.adapters is not None
        if load_model or has_adapters:  # a checkpoint of adapters has no base model
            folder = self.spec.model.weights or self.spec.model.path
            log.info("loading its part of %s", folder)
            start = time.perf_counter()
            load_weights(self.actor, folder)
            if load_model and (lora := self.spec.policy.lora) and lora.start:
                load_adapters(self.actor, lora.start)
            log.info("loaded in %.1f s", time.perf_counter() - start)
        fused_norms: bool = self.actor.fused_norms
        return fused_norms

    def enter(self, phase: Phase) -> Metrics:
        """Returns the memory of this rank's GPU before and after, and its pinned memory; nothing on a CPU."""
        from megatron_rl.actor.platform import device_memory

        start, before = time.perf_counter(), device_memory()
        self.actor.enter(phase)
        log.info("entered the phase %s in %.3f s", phase, time.perf_counter() - start)
        after = device_memory()
        if before is None or after is None:
            return {}
        role = self.role
        return {
            f"memory/{role}_gpu_bytes_before/{phase}": float(before[0]),
            f"memory/{role}_gpu_bytes_in/{phase}": float(after[0]),
            f"memory/{role}_pinned_bytes": float(after[1]),
        }

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        log.info("writing the checkpoint %s", folder)
        self.actor.save(Path(folder), extra)

    def is_saved(self) -> bool:
        is_saved: bool = self.actor.is_saved
        return is_saved

    def finish_save(self) -> None:
        self.actor.finish_save()

    def load(self, folder: str) -> dict[str, Any]:
        log.info("reading the checkpoint %s", folder)
        extra: dict[str, Any] = self.actor.load(Path(folder))
        return extra

    def mirror(self, step: int, holders: Mapping[str, Any]) -> tuple[Metrics, list[str]]:
        """Copy the state to the holders; returns metrics, and the names of the holders that are lost."""
        start = time.perf_counter()
        state = self.actor.snapshot()
        lost = send_state(state, self.rank, step, holders)
        metrics = {
            "mirror/bytes": float(state.nbytes),
            "mirror/copies": float(len(holders) - len(lost)),
            "mirror/seconds": time.perf_counter() - start,
        }
        return metrics, lost

    def load_mirror(self, step: int, holder: Any) -> None:
        log.info("takes the state of step %d from a mirror", step)
        self.actor.restore(fetch_state(self.rank, step, holder))

    def export_hf(self, folder: str) -> None:
        from megatron_rl.actor.adapter_folders import export_adapters
        from megatron_rl.actor.weights import export_hf

        log.info("writing the Hugging Face folder %s", folder)
        export_hf(self.actor, Path(folder))
        if self.spec.shape.adapters is not None and not self.spec.shape.value_head:
            export_adapters(self.actor, Path(folder) / "adapters")


class RankGroup:
    """All ranks of one model."""

    role: str
    """The name of the ranks in messages, logs and placement."""
    kind: type[MegatronRank]
    """What runs in their processes."""

    def __init__(self, spec: ActorSpec, cluster: ClusterConfig, logs: Path, placement: RayPlacement) -> None:
        """Start the processes on their nodes; `start` makes them load the model."""
        self.mesh: Mesh = spec.policy.parallel.mesh
        self._spec, self._cluster, self._logs, self._placement = spec, cluster, logs, placement
        self._mirrors = Mirrors(logs, self.role)
        self._mirroring: list[ray.ObjectRef] = []
        self.num_changes = 0
        """See `ports.Policy`."""
        self.make_room: Callable[[], Sequence[str | None]] = lambda: [None] * self.mesh.world_size
        """Frees the GPUs of the ranks that start next, and returns the one of each; None if Ray gives it one. The
        colocation sets it."""
        self.before: Callable[[Phase], object] = _stay
        """Brings the run into a phase, if engines share the ranks' GPUs; the colocation sets it."""
        self._begin(start_in_turn(cluster, self.mesh.world_size, num_cores()))

    def _begin(self, in_turn: bool = False) -> None:
        remote = ray.remote(self.kind)
        self.ranks: list[Any] = []
        for rank in range(self.mesh.world_size):
            if in_turn and rank:  # a process that fails is told by the next call
                settle([self.ranks[-1].prepare.remote(None)], self._cluster.start_timeout_s)
            options = self._placement.rank_options(self.role, 0, rank)
            self.ranks.append(remote.options(**options).remote(self._spec, rank, str(self._logs), self.role))
        self.processes = [
            Process(f"{self.role} rank {rank}", self._logs / f"{self.role}_{rank}.log", actor)
            for rank, actor in enumerate(self.ranks)
        ]

    def prepare(self, gpus: Sequence[str | None]) -> list[ray.ObjectRef]:
        """Let each rank import its libraries, on the GPU that it shares with an engine; None if Ray gives it one."""
        return [rank.prepare.remote(gpu) for rank, gpu in zip(self.ranks, gpus, strict=True)]

    def start(self, *, is_resumed: bool = False) -> None:
        """Connect the ranks and load the model. It is not part of the constructor, so that the engines can start at the
        same time.

        Args:
            is_resumed: `load` follows, so the model's folder is read only if a reference policy needs its weights.
        """
        load_model = not is_resumed or "logp_ref" in self._spec.objective.needs
        timeout_s = self._cluster.start_timeout_s
        needs = f"{self._cluster.cpus_per_trainer:g} CPU and {self._cluster.gpus_per_trainer:g} GPU"
        locate_all(self.processes, timeout_s, needs)
        store = gather([self.ranks[0].serve.remote()], self.processes[:1], "to serve a store", timeout_s)[0]
        secret = secrets.token_hex(16)
        self.prepare(self.make_room())
        calls = [rank.start.remote(*store, secret, load_model) for rank in self.ranks]
        self.fused_norms: bool = gather(calls, self.processes, "to load the model", timeout_s)[0]

    def start_again(self) -> list[int]:
        """Restart all ranks, with the weights that the run began with; returns the steps whose state the mirrors
        hold.

        Raises:
            PolicyLost: a new rank was lost too.
        """
        for rank in self.ranks:
            ray.kill(rank)
        self._mirroring = []
        self._placement.place_again(self.role)
        try:
            self._begin()
            self.start()
        except RuntimeError as error:
            raise PolicyLost(str(error)) from error
        return whole_steps(self._mirrors.offers(), self.mesh.world_size)

    def mirror(self, step: int) -> None:
        """See `ports.Policy`."""
        if self._cluster.mirror:
            holders = self._mirrors.holders_of([process.placed.node for process in self.processes])
            self._mirroring = [
                rank.mirror.remote(step, of_rank) for rank, of_rank in zip(self.ranks, holders, strict=True)
            ]

    def load_mirror(self, step: int) -> None:
        """See `ports.Policy`."""
        self._mirrors.forget_after(step)
        offers = self._mirrors.offers()
        calls = [rank.load_mirror.remote(step, offers[number, step]) for number, rank in enumerate(self.ranks)]
        self._gather(calls, "to restore its state from a mirror")

    def _finish_mirrors(self) -> Metrics:
        """Wait for the copies that `mirror` began. The metrics are the bytes of all ranks, the fewest copies of a
        rank's state, and the seconds of the slowest rank."""
        if not self._mirroring:
            return {}
        calls, self._mirroring = self._mirroring, []
        answers = self._gather_all(calls, "to mirror its state")
        for node in {node for _, lost in answers for node in lost}:
            self._mirrors.give_up(node)
        told = [metrics for metrics, _ in answers]
        return {
            "mirror/bytes": sum(one["mirror/bytes"] for one in told),
            "mirror/copies": min(one["mirror/copies"] for one in told),
            "mirror/seconds": max(one["mirror/seconds"] for one in told),
        }

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """See `ports.Policy`."""
        self.before("training")
        self._all("save", "to copy its state for a checkpoint", str(folder.absolute()), extra)

    def finish_save(self, wait: bool) -> bool:
        """See `ports.Policy`."""
        if not wait and not all(self._gather_all([rank.is_saved.remote() for rank in self.ranks], "to answer")):
            return False
        self._all("finish_save", "to write a checkpoint")
        return True

    def load(self, folder: Path) -> dict[str, Any]:
        """See `ports.Policy`."""
        self.before("training")
        extra: dict[str, Any] = self._all("load", "to read a checkpoint", str(folder.absolute()))
        return extra

    def export_hf(self, folder: Path) -> None:
        """See `ports.Policy`."""
        self.before("training")
        self._all("export_hf", "to export the model", str(folder.absolute()))

    def enter(self, phase: Phase) -> None:
        """Make all ranks enter a phase, and keep what they tell of their GPUs' memory."""
        told = self._gather_all([rank.enter.remote(phase) for rank in self.ranks], f"to enter the phase {phase}")
        for process, metrics in zip(self.processes, told, strict=True):
            process.memory |= metrics

    def columns_of(self, shares: Sequence[Share], names: Sequence[Column]) -> dict[Column, TokenNumbers]:
        """Columns of the samples in the shares that the ranks hold."""
        answers = self._gather_all([rank.columns.remote(names) for rank in self.ranks], "to tell its columns")
        indices = [share.index for share in shares]
        return {
            name: TokenNumbers.of_replicas(self.mesh, [answer and answer[name] for answer in answers], indices)
            for name in names
        }

    def take(self, shares: Sequence[Share], columns: Mapping[Column, TokenNumbers]) -> list[ray.ObjectRef]:
        """Begin to give every data-parallel rank its share of a later epoch, with the columns of its samples."""
        annotated = with_columns(shares, columns)
        return [rank.take.remote(share) for rank, share in zip(self.ranks, self._of_replicas(annotated), strict=True)]

    def _all(self, method: str, doing: str, *arguments: Any) -> Any:
        """Call a method on all ranks; see `_gather`."""
        return self._gather([getattr(rank, method).remote(*arguments) for rank in self.ranks], doing)

    def _of_replicas(self, arguments: Sequence[Any]) -> list[Any]:
        """The argument of each rank, from one argument for each data-parallel replica, which the driver stores once."""
        held = [ray.put(argument) for argument in arguments]
        return [held[self.mesh.coordinates(rank)[2]] for rank in range(self.mesh.world_size)]

    def _gather(self, calls: Sequence[ray.ObjectRef], doing: str) -> Any:
        """The ranks' common answer; see `_gather_all`."""
        return self._gather_all(calls, doing)[0]

    def _gather_all(self, calls: Sequence[ray.ObjectRef], doing: str) -> list[Any]:
        """The ranks' answers. They agree on a ValueError.

        Raises:
            ValueError: the ranks raised it.
            PolicyLost: any other error occurred. Some ranks may then be inside a collective for ever.
        """
        deadlines = self._placement.deadlines
        deadlines.begin(doing)
        try:
            answers = gather(calls, self.processes, doing, deadlines.limit_s(doing))
        except ProcessLost as error:
            note = f"\n{deadlines.describe(doing)}" if error.silent else ""
            raise PolicyLost(f"{error}{note}") from error
        except RuntimeError as error:
            raise PolicyLost(str(self._death() or error)) from error
        deadlines.end(doing)
        return answers

    def _death(self) -> Exception | None:
        """The death of a rank, which its peers may notice as an error of a collective before Ray does."""
        calls = [rank.locate.remote() for rank in self.ranks]
        for process, outcome in zip(self.processes, settle(calls, DEATH_S), strict=True):
            if isinstance(outcome, RayActorError):
                return explain(outcome, process)
        return None


def let_segments_grow(environment: MutableMapping[str, str]) -> None:
    """Unless the user has set torch's allocator, let it grow its segments on a GPU, so that rows of other lengths leave
    no gaps. Torch reads the variable at its first allocation. Ranks that share GPUs must not do it: the bridge sends
    CUDA IPC handles there."""
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def _stay(phase: Phase) -> None:
    """Ranks that have their GPUs for themselves hold everything in every phase."""
