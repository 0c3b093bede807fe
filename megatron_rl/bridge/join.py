"""Joining: all trainer ranks and all engine ranks meet over a store, agree on the plan, and open their lines.

Only two ranks that exchange messages open a line, so a thousand ranks do not make a million connections. The default
process group is not touched. Invariants (tests/unit/bridge): if ranks disagree about the plan, all of them refuse to
join with the same error; a rank that is missing is named within the deadline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import timedelta
from functools import lru_cache

import torch
from torch.distributed import DistStoreError, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore

from megatron_rl.bridge.line import GroupInlet, GroupOutlet
from megatron_rl.bridge.memory import Slots, opened, place
from megatron_rl.bridge.setup import BridgeSetup

CONNECT_S = 60.0
"""A connection may take at least this long, however short the deadline of a push is: a loaded machine takes seconds."""
GRACE_S = 5.0
"""The other ranks wait so much longer than rank 0, which names the ranks that are missing."""


def host_store(host: str, timeout_s: float = 300.0) -> TCPStore:
    """Serve the store of the bridge on a free port (`.port`). It serves as long as something refers to it."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class Joining:
    """How one rank joins. Ranks are numbered as `BridgeSetup.world_size` counts them.

    The constructor returns when all ranks agree. Then a rank offers its buffers to the ranks that are near, and opens
    its lines one after the other.
    """

    def __init__(self, setup: BridgeSetup, rank: int, device: torch.device) -> None:
        """Wait until every rank has joined and all agree.

        Raises:
            ValueError: the ranks do not agree on what is transferred.
            RuntimeError: a rank did not join within the deadline.
        """
        self.rank, self.device, timeout = rank, device, timedelta(seconds=setup.timeout_s)
        self._patience = max(timeout, timedelta(seconds=CONNECT_S))
        self._num_trainers = setup.mesh.world_size
        try:
            self._tcp = TCPStore(setup.host, setup.port, is_master=False, timeout=self._patience)
        except DistStoreError as error:
            raise RuntimeError(f"no process serves the bridge's store at {setup.host}:{setup.port}: {error}") from error
        self._tcp.set_timeout(timeout)
        self._store = PrefixStore(f"megatron_rl/bridge/{setup.epoch}", self._tcp)
        mine = place(device) if setup.share_memory else f"rank {rank}"
        self._store.set(f"rank/{rank}", json.dumps({"says": setup.agreement, "place": mine, "device": device.type}))
        if rank == 0:
            self._store.set("verdict", _judge(self._store, setup))
        try:
            self._store.wait(["verdict"], timeout + timedelta(seconds=GRACE_S))
        except DistStoreError as error:
            raise RuntimeError(f"trainer rank 0 did not join the bridge within {setup.timeout_s:g} s") from error
        kind, _, text = self._store.get("verdict").decode().partition(":")
        if kind:
            raise {"disagree": ValueError, "absent": RuntimeError}[kind](text)
        self._place = mine

    def near(self, peers: Iterable[int]) -> set[int]:
        """Peers that can read this rank's buffers, and whose buffers this rank can read."""
        return {peer for peer in peers if self._said(peer)["place"] == self._place}

    def offer(self, slots: Slots) -> None:
        """Let the ranks that are near open these buffers."""
        self._store.set(f"slots/{self.rank}", slots.handle)

    def outlet(self, destination: int, near: bool) -> GroupOutlet:
        """Open the line to another rank. Both ends open their lines in one order: that of the messages."""
        control, payload, memory = self._groups(f"{self.rank}-{destination}", destination, False, near)
        return GroupOutlet(control, payload, peer=1, name=self._name(destination), memory=memory)

    def inlet(self, source: int, near: bool) -> GroupInlet:
        """Open the line from another rank."""
        control, payload, memory = self._groups(f"{source}-{self.rank}", source, True, near)
        slots = opened(self._store.get(f"slots/{source}").decode(), self.device) if near else ()
        return GroupInlet(control, payload, peer=0, name=self._name(source), memory=memory, slots=slots)

    def _groups(
        self, name: str, peer: int, second: bool, near: bool
    ) -> tuple[ProcessGroup, ProcessGroup | None, torch.device]:
        """The groups for control and payload, and where contents lie on this rank."""
        store = PrefixStore(name, self._store)
        control = _gloo(store, second, self._patience)
        if near:
            return control, None, self.device
        if self.device.type == self._said(peer)["device"] == "cuda":
            return control, _nccl(store, second, self._patience), self.device
        return control, control, torch.device("cpu")

    def _said(self, peer: int) -> dict[str, str]:
        return json.loads(self._store.get(f"rank/{peer}"))

    def _name(self, rank: int) -> str:
        return f"trainer rank {rank}" if rank < self._num_trainers else f"engine rank {rank - self._num_trainers}"


def _judge(store: Store, setup: BridgeSetup) -> str:
    """The verdict of rank 0: an empty text, or the kind of the error and its message."""
    keys = [f"rank/{rank}" for rank in range(setup.world_size)]
    try:
        said = [json.loads(text)["says"] for text in store.multi_get(keys)]
    except DistStoreError:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return (
            f"absent:ranks {absent} of {setup.world_size} did not join the bridge within {setup.timeout_s:g} s "
            f"(trainers come first, from rank {setup.mesh.world_size} on they are engine workers)"
        )
    others = {text: rank for rank, text in enumerate(said) if text != said[0]}
    if not others:
        return ""
    return (
        f"disagree:the bridge's ranks do not agree: rank 0 says {said[0]!r}, "
        + ", ".join(f"rank {rank} says {text!r}" for text, rank in others.items())
        + "; give trainer and engines the same model, meshes and dtype"
    )


def _gloo(store: Store, second: bool, timeout: timedelta) -> ProcessGroup:
    options = ProcessGroupGloo._Options()
    options._devices = [_gloo_device()]
    options._timeout, options._threads = timeout, 1
    return ProcessGroupGloo(PrefixStore("gloo", store), int(second), 2, options)


@lru_cache(maxsize=1)
def _gloo_device():
    """The process has one device: all its groups share one listener and one thread."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_default_device()


def _nccl(store: Store, second: bool, timeout: timedelta) -> ProcessGroup:
    """This has not been run."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(PrefixStore("nccl", store), int(second), 2, options)
