"""Joining: every trainer rank and every engine worker meet once over a store, agree, and open their lines.

Lines are opened between pairs of ranks that the plan joins, and only these: nobody's default group is touched, and a
thousand ranks do not make a million connections. Invariants (tests/unit/bridge): ranks that disagree about the plan
refuse to join, all of them, with the same words; a rank that is missing is named within the deadline.
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
"""A connection may take this long at least: loaded machines take seconds, whatever the deadline of a push is."""
GRACE_S = 5.0
"""Rank 0 names who is missing; the others wait so much longer for its words."""


def host_store(host: str, timeout_s: float = 300.0) -> TCPStore:
    """Serve the rendezvous on a free port (`.port`); keep the value alive as long as the bridge."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class Joining:
    """One rank's way in. Ranks count the trainers first, then the engines' ranks, as `BridgeSetup` says.

    First all agree (the constructor); then a rank offers its buffers to those that are near, and opens its lines one
    after the other.
    """

    def __init__(self, setup: BridgeSetup, rank: int, device: torch.device) -> None:
        """Return when every rank has come and all agree.

        Raises:
            ValueError: the ranks do not agree on what is transferred.
            RuntimeError: a rank did not come.
        """
        self.rank, self.device, timeout = rank, device, timedelta(seconds=setup.timeout_s)
        self._patience = max(timeout, timedelta(seconds=CONNECT_S))
        self._num_trainers = setup.mesh.world_size
        try:
            self._tcp = TCPStore(setup.host, setup.port, is_master=False, timeout=self._patience)
        except DistStoreError as error:
            raise RuntimeError(f"nobody serves the bridge's store at {setup.host}:{setup.port}: {error}") from error
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
        """To those that are near."""
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
    """Rank 0's: empty, or what is wrong."""
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
    """One of the process: all its groups share a listener and a thread."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_default_device()


def _nccl(store: Store, second: bool, timeout: timedelta) -> ProcessGroup:
    """Not run."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(PrefixStore("nccl", store), int(second), 2, options)
