"""How messages pass from one rank to another: one small port, and its form over process groups.

A line joins two ranks. One end posts messages; the other end takes them and acknowledges each. A rank has two messages
under way: the acknowledgement of message i frees the buffer that message i + 2 is packed into. Headers and
acknowledgements pass over gloo. The content passes over gloo or NCCL, or it stays where it is if the receiver can read
the sender's buffers (`memory.py`). Files are another form of the port (`files.py`).

No rank waits for a send. When a connection breaks, gloo ends the receives that have no byte yet. It forgets a send that
it has begun to write, and a receive that it has begun to read: a rank that waited for one of these would wait until its
deadline. So a content is sent before its header, and the receiver waits for the header; the sender waits for the
acknowledgement; and an end mark tells the receiver that its last acknowledgements have arrived.

Invariants (tests/unit/bridge): what is taken is what was posted; a peer that dies is a RuntimeError at once, also in
the middle of a content; a peer that is silent is a RuntimeError within the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megatron_rl.bridge.messages import Message

SLOTS = 2
"""How many messages a rank has under way, and how many buffers it has to pack them or to receive them in."""
WRITTEN, CORRUPTED, NOT_EXPECTED = 0, 1, 2
HEADER, CONTENT, ACKNOWLEDGEMENT = 1, 2, 3
"""Message i has the tags 3 i + 1, 3 i + 2 and 3 i + 3."""
END = 0
"""This is the tag of the end mark of a push."""


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    number: int
    slot: int
    """The sender's buffer in which the message is packed."""
    checksum: tuple[int, int] | None
    """The checksum of the content, if the push is verified."""

    def encode(self) -> Tensor:
        sums = self.checksum or (0, 0)
        return torch.tensor([self.version, self.number, self.slot, self.checksum is not None, *sums])

    @classmethod
    def decode(cls, numbers: Tensor) -> Header:
        version, number, slot, checked, *sums = numbers.tolist()
        return cls(version, number, slot, tuple(sums) if checked else None)


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """It tells the sender what became of a message."""

    status: int
    version: int
    """The version that the receiver expected."""


PEER_LOST = "has died, or is silent past the deadline"
"""How a rank's error speaks of the peer that it waited for; such an error is the consequence of another one."""


class Deadline:
    """The deadline of a whole push: each wait may use the time that is left."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def left(self) -> timedelta:
        """At least a millisecond, because gloo replaces 0 by its own default."""
        return timedelta(seconds=max(self._end - time.monotonic(), 1e-3))


class Outlet(Protocol):
    """The end that posts."""

    near: bool
    """The receiver reads this rank's buffers: every message is packed, and none is sent from where it lies."""
    memory: torch.device
    """Contents must lie in the memory of this device."""

    def begin(self, version: int, deadline: Deadline) -> None: ...

    def post(self, message: Message, header: Header, content: Tensor) -> None:
        """Send a message (uint8). Its content must not change until it is acknowledged."""

    def acknowledgement(self, message: Message, deadline: Deadline) -> Acknowledgement:
        """Wait until the receiver does not need the message any more."""

    def finish(self, version: int, deadline: Deadline) -> None:
        """Tell the receiver that all its acknowledgements have arrived."""

    def close(self) -> None: ...


class Inlet(Protocol):
    """The end that takes."""

    near: bool
    """Messages are read in the sender's buffers, and need no room here."""
    memory: torch.device
    """Contents arrive in the memory of this device."""

    def begin(self, version: int, deadline: Deadline) -> None: ...

    def expect(self, message: Message, room: Tensor | None) -> None:
        """Be ready: the content may arrive in `room` (uint8) from now on."""

    def take(self, message: Message, deadline: Deadline) -> tuple[Header, Tensor]:
        """Wait for an expected message. Its content stays as it is until it is acknowledged."""

    def acknowledge(self, message: Message, acknowledgement: Acknowledgement) -> None: ...

    def finish(self, version: int, deadline: Deadline) -> None:
        """Wait until the sender has all acknowledgements."""

    def close(self) -> None: ...


class GroupLine:
    """What both ends over process groups of two ranks have in common."""

    def __init__(
        self,
        control: ProcessGroup,
        payload: ProcessGroup | None,
        *,
        peer: int,
        name: str,
        memory: torch.device,
        slots: Sequence[Tensor] = (),
    ) -> None:
        """
        Args:
            control: gloo, for headers and acknowledgements.
            payload: for contents; None: the receiver reads them in the sender's `slots`.
            peer: the other's rank in the groups, 0 or 1.
            name: what errors call the other rank.
            memory: where contents lie here; gloo reads and writes the memory of the CPU.
        """
        self.near, self.memory = payload is None, memory
        self._control, self._payload, self._slots, self._peer, self._name = control, payload, slots, peer, name
        # Works with the memory that they read or write. A work keeps its group's socket open, so `close` forgets all.
        self._messages: dict[int, list[tuple[Work, Tensor]]] = {}
        self._acknowledgements: list[tuple[Work, Tensor]] = []
        self._mark: list[tuple[Work, Tensor]] = []

    def close(self) -> None:
        """A process group closes its sockets when nothing refers to it any more. The other end fails then."""
        if self._payload is not None and self._payload is not self._control:
            self._payload.abort()  # NCCL's kernels may stand in a message that never comes
        self._messages, self._acknowledgements, self._mark = {}, [], []
        del self._control, self._payload

    def _send(self, works: list[tuple[Work, Tensor]], group: ProcessGroup, memory: Tensor, tag: int) -> None:
        with self._named():
            works.append((group.send([memory], self._peer, tag), memory))

    def _receive(self, works: list[tuple[Work, Tensor]], group: ProcessGroup, memory: Tensor, tag: int) -> None:
        with self._named():
            works.append((group.recv([memory], self._peer, tag), memory))

    def _wait(self, works: list[tuple[Work, Tensor]], deadline: Deadline) -> None:
        """Wait for receives, in their order."""
        try:
            with self._named():
                for number in range(len(works)):
                    works[number][0].wait(deadline.left)
        finally:
            works.clear()  # a traceback would keep them

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"{self._name} {PEER_LOST}: {error}") from error


class GroupOutlet(GroupLine):
    def begin(self, version: int, deadline: Deadline) -> None:
        """The receiver has the end mark of the push before."""
        self._mark = []

    def post(self, message: Message, header: Header, content: Tensor) -> None:
        self._messages[message.number] = works = []
        if self._payload is not None:
            self._send(works, self._payload, content, 3 * message.number + CONTENT)
        self._send(works, self._control, header.encode(), 3 * message.number + HEADER)

    def acknowledgement(self, message: Message, deadline: Deadline) -> Acknowledgement:
        works: list[tuple[Work, Tensor]] = []
        numbers = torch.empty(2, dtype=torch.int64)
        self._receive(works, self._control, numbers, 3 * message.number + ACKNOWLEDGEMENT)
        self._wait(works, deadline)
        del self._messages[message.number]  # the receiver has the whole message
        return Acknowledgement(*numbers.tolist())

    def finish(self, version: int, deadline: Deadline) -> None:
        """gloo writes the mark at once: the receiver posted its receive before it acknowledged anything."""
        self._send(self._mark, self._control, torch.zeros(1), END)


class GroupInlet(GroupLine):
    def begin(self, version: int, deadline: Deadline) -> None:
        self._receive(self._mark, self._control, torch.empty(1), END)

    def expect(self, message: Message, room: Tensor | None) -> None:
        header: list[tuple[Work, Tensor]] = []
        content: list[tuple[Work, Tensor]] = []
        if self._payload is not None:
            assert room is not None
            self._receive(content, self._payload, room, 3 * message.number + CONTENT)
        self._receive(header, self._control, torch.empty(6, dtype=torch.int64), 3 * message.number + HEADER)
        self._messages[message.number] = header + content

    def take(self, message: Message, deadline: Deadline) -> tuple[Header, Tensor]:
        """The header is waited for first: over gloo the content has arrived before it, and NCCL's waits have no
        deadline."""
        works = self._messages.pop(message.number)
        memory = [tensor for _, tensor in works]
        self._wait(works, deadline)
        header = Header.decode(memory[0])
        return header, self._slots[header.slot][: message.num_bytes] if self.near else memory[1]

    def acknowledge(self, message: Message, acknowledgement: Acknowledgement) -> None:
        numbers = torch.tensor([acknowledgement.status, acknowledgement.version])
        self._send(self._acknowledgements, self._control, numbers, 3 * message.number + ACKNOWLEDGEMENT)

    def finish(self, version: int, deadline: Deadline) -> None:
        self._wait(self._mark, deadline)
        self._acknowledgements = []
