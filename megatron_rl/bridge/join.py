"""Joining: all trainer ranks and all engine ranks meet over a store, agree on the plan, and open their lines.

Only two ranks that exchange messages open a line, so a thousand ranks do not make a million connections. The default
process group is not touched. Invariants (tests/unit/bridge): if ranks disagree about the plan, all of them refuse to
join with the same error; a rank that is missing is named within the deadline; once joining has been given up, every
rank that waits, or comes later, ends with an error; when joining ends, no message of a push waits for a connection.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch.distributed import DistStoreError, PrefixStore, ProcessGroupGloo, Store, TCPStore

from megatron_rl.bridge.line import Contents, GroupInlet, GroupOutlet, MessageGroup
from megatron_rl.bridge.memory import Probe, Slots, opened, reads, synchronize
from megatron_rl.bridge.setup import BridgeSetup

CONNECT_S = 60.0
"""A connection may take at least this long, however short the deadline of a push is: a loaded machine takes seconds."""
BACKLOG = 2048
"""How many ranks may connect to the store at the same time."""


def host_store(host: str, timeout_s: float = 300.0) -> TCPStore:
    """Serve a store on a free port (`.port`). It serves as long as something refers to it.

    PyTorch's store has no password, and would listen on all addresses of the machine; this one listens at `host` alone.
    """
    listener = socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG
    )
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


ABSENT = "did not join the bridge"
"""Text of the error that says that another rank did not come."""


class Joining:
    """How one rank joins. Ranks are numbered as `BridgeSetup.world_size` counts them.

    The constructor returns when all ranks agree. Then a rank offers its buffers to the ranks that are near, says with
    `share_contents` whether it has lines to others, and opens its lines one after the other.
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
        self._store = _part_of(self._tcp, setup)
        self._are_chained = setup.engines.are_chained
        self._contents: list[Contents] = []
        self._share_memory, self._probe = setup.share_memory, Probe(device)
        said = {"says": setup.agreement, "probe": self._probe.says, "device": device.type}
        self._store.set(f"rank/{rank}", json.dumps(said))
        if self._store.add("joined", 1) == setup.world_size:
            self._store.compare_set("verdict", "", _judge(self._store, setup))
        try:
            self._store.wait(["verdict"], timeout)
        except DistStoreError as error:
            raise RuntimeError(_absent(self._store, setup)) from error
        kind, _, text = self._store.get("verdict").decode().partition(":")
        if kind != "agree":
            raise {"disagree": ValueError, "absent": RuntimeError}[kind](text)
        agreed = json.loads(text)
        self._devices: list[str] = agreed["devices"]
        self._share_gpus: bool = agreed["share GPUs"]

    def readable(self, sources: Iterable[int]) -> set[int]:
        """The ranks among `sources` whose buffers this rank can read. Every source gets the answer."""
        near = set()
        for source in sources:
            if self._share_memory and reads(self._said(source)["probe"], self.device):
                near.add(source)
            self._store.set(f"near/{source}-{self.rank}", "yes" if source in near else "no")
        return near

    def readers(self, destinations: Iterable[int]) -> set[int]:
        """The ranks that can read this rank's buffers. The call waits for the answer of every destination."""
        return {to for to in destinations if self._store.get(f"near/{self.rank}-{to}") == b"yes"}

    def offer(self, slots: Slots) -> None:
        """Let the ranks that are near open these buffers."""
        self._store.set(f"slots/{self.rank}", slots.handle)

    def share_contents(self, outlets: Mapping[int, int], inlets: Mapping[int, int]) -> None:
        """Make the process groups over which contents pass between devices that have them together, and connect this
        rank with its peers in them. All their ranks make them, or none: if no rank has a line that needs them, because
        a communicator takes memory, and if ranks share a GPU, because NCCL refuses this. Lines between GPUs then have
        groups of their own.

        Args:
            outlets, inlets: the hop of each line that this rank will have, by the rank at its other end; only lines
                whose receiver does not read the sender's memory.
        """
        kind = self.device.type
        if kind not in SHARED_GROUPS or self._share_gpus:
            return
        places = {rank: place for place, rank in enumerate(r for r, one in enumerate(self._devices) if one == kind)}
        self._store.add(f"far/{kind}", int(any(rank in places for rank in (*outlets, *inlets))))
        if self._store.add(f"told/{kind}", 1) == len(places):  # the last of all, so the sum is complete
            self._store.set(f"needed/{kind}", str(self._store.add(f"far/{kind}", 0)))
        if self._store.get(f"needed/{kind}") == b"0":
            return
        make = SHARED_GROUPS[kind]
        for number in range(2 if self._are_chained else 1):
            store = PrefixStore(f"contents/{number}", self._store)
            group = make(store, places[self.rank], len(places), self._patience, self.device)
            to, sources = ([places[r] for r, hop in ends.items() if hop % 2 == number] for ends in (outlets, inlets))
            _connect(group, to, sources, self.device)
            self._contents.append(Contents(group, places))

    def outlet(self, destination: int, near: bool, hop: int = 0) -> GroupOutlet:
        """Open the line to another rank. Both ends open their lines in the order of the messages.

        Args:
            hop: the number of engines that messages have passed when they come to this line.
        """
        control, contents, memory = self._groups(f"{self.rank}-{destination}", destination, False, near, hop)
        return GroupOutlet(control, contents, peer=1, rank=destination, name=self._name(destination), memory=memory)

    def inlet(self, source: int, near: bool, hop: int = 0) -> GroupInlet:
        """Open the line from another rank; see `outlet`."""
        control, contents, memory = self._groups(f"{source}-{self.rank}", source, True, near, hop)
        slots = opened(self._store.get(f"slots/{source}").decode(), self.device) if near else ()
        return GroupInlet(control, contents, peer=0, rank=source, name=self._name(source), memory=memory, slots=slots)

    def _groups(
        self, name: str, peer: int, second: bool, near: bool, hop: int
    ) -> tuple[MessageGroup, Contents | None, torch.device]:
        """The groups for control and contents, and where contents lie on this rank."""
        store = PrefixStore(name, self._store)
        control = _gloo(store, second, self._patience)
        if near:
            return control, None, self.device
        if self.device.type == self._devices[peer] and (make := SHARED_GROUPS.get(self.device.type)):
            if self._contents:
                return control, self._contents[hop % 2], self.device
            group = make(PrefixStore("contents", store), int(second), 2, self._patience, self.device)
            _connect(group, [] if second else [1], [0] if second else [], self.device)
            return control, Contents(group, {peer: 1 - second}), self.device
        return control, Contents(control), torch.device("cpu")

    def _said(self, peer: int) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self._store.get(f"rank/{peer}"))
        return said

    def _name(self, rank: int) -> str:
        return f"trainer rank {rank}" if rank < self._num_trainers else f"engine rank {rank - self._num_trainers}"


def give_up(store: Store, setup: BridgeSetup, reason: str) -> None:
    """End the wait of all ranks that join, with an error."""
    _part_of(store, setup).compare_set("verdict", "", f"absent:{reason}: a rank {ABSENT}")


def _part_of(store: Store, setup: BridgeSetup) -> Store:
    """The part of the store that belongs to one joining."""
    return PrefixStore(f"megatron_rl/{setup.secret}/bridge/{setup.epoch}", store)


def _judge(store: Store, setup: BridgeSetup) -> str:
    """The verdict on what all ranks have said: "agree:" and what each of them needs to know of all others, in JSON; or
    "disagree:" and a message. Only one rank reads what all have said: among a thousand it would be a million answers of
    the store."""
    ranks = [json.loads(text) for text in store.multi_get([f"rank/{rank}" for rank in range(setup.world_size)])]
    said = [rank["says"] for rank in ranks]
    others = {text: rank for rank, text in enumerate(said) if text != said[0]}
    if not others:
        gpus = [rank["probe"][-1] for rank in ranks if rank["device"] == "cuda"]
        shares = len(set(gpus)) < len(gpus)
        return "agree:" + json.dumps({"devices": [rank["device"] for rank in ranks], "share GPUs": shares})
    return (
        f"disagree:the bridge's ranks do not agree: rank 0 says {said[0]!r}, "
        + ", ".join(f"rank {rank} says {text!r}" for text, rank in others.items())
        + "; give trainer and engines the same model, meshes and dtype"
    )


def _absent(store: Store, setup: BridgeSetup) -> str:
    absent = [rank for rank in range(setup.world_size) if not store.check([f"rank/{rank}"])]
    return (
        f"ranks {absent} of {setup.world_size} {ABSENT} within {setup.timeout_s:g} s "
        f"(trainers come first, from rank {setup.mesh.world_size} on they are engine workers)"
    )


SILENT_S = 20
"""A connection whose other end does not answer for this long is closed: its node or the network between is gone."""


def _close_when_silent(before: set[int]) -> None:
    """Let the kernel close every connection of this process that is not in `before` when the other end is silent.

    gloo does not ask for this, and would wait until the deadline of a push. An end that is only busy still answers: its
    kernel does. gloo sends a content when the receive has been posted, so no end refuses bytes for long.
    """
    for descriptor in _sockets() - before:
        try:
            copy = os.dup(descriptor)
        except OSError:  # another thread has closed it since
            continue
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):  # and has opened a file, which got the same number
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as end:
            if end.type == socket.SOCK_STREAM and end.family in (socket.AF_INET, socket.AF_INET6):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 2)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_S // 4)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)


def _sockets() -> set[int]:
    """The descriptors of this process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def _gloo(store: Store, second: bool, timeout: timedelta) -> MessageGroup:
    gloo: Any = ProcessGroupGloo  # torch's types lack its options
    options = gloo._Options()
    options._devices = [_gloo_device()]
    options._timeout, options._threads = timeout, 1
    before = _sockets()
    group: MessageGroup = gloo(PrefixStore("gloo", store), int(second), 2, options)
    _close_when_silent(before)
    return group


@lru_cache(maxsize=1)
def _gloo_device() -> ProcessGroupGloo.Device:
    """The process has one device: all its groups share one listener and one thread."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_default_device()


def _nccl(store: Store, rank: int, num_ranks: int, timeout: timedelta, device: torch.device) -> MessageGroup:
    """This has not been run."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # then torch ends the process; the deadline of a push comes first, with an error
    group: Any = ProcessGroupNCCL(store, rank, num_ranks, options)
    # A connected group sends and receives over its own communicator; otherwise each pair of ranks gets another one.
    group.eager_connect_single_device(device)
    made: MessageGroup = group
    return made


def _connect(group: MessageGroup, to: Iterable[int], sources: Iterable[int], device: torch.device) -> None:
    """Connect this rank with all its peers of a group, which do the same, by a byte to or from each.

    NCCL connects a pair at its first message: the send and the receive both wait, on the host, until the other one has
    been called. An engine that receives from two trainers would wait for the second one before it has answered the
    first, and in a push these waits can form a circle. The messages of one NCCL group are connected together, so here
    no order matters.
    """
    group._start_coalescing()
    for rank in to:
        group.send([torch.zeros(1, dtype=torch.uint8, device=device)], rank, 0)
    for rank in sources:
        group.recv([torch.empty(1, dtype=torch.uint8, device=device)], rank, 0)
    if work := group._end_coalescing():  # None: this rank has no peer
        work.wait()
        synchronize(device)


SHARED_GROUPS: dict[str, Callable[[Store, int, int, timedelta, torch.device], MessageGroup]] = {"cuda": _nccl}
"""The types of devices that have one group for their contents together, and how a rank makes it: (store, rank in the
group, number of ranks, time-out of a connection, device)."""
