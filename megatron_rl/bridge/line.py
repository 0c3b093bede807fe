"""How messages pass from one rank to another: one small port, and its form over process groups.

A line joins two ranks. One end posts messages, the other takes them and answers each. A rank has two messages under
way: the answer to message i frees the buffer that message i + 2 is packed into. Headers and answers pass over gloo; the
content over gloo or NCCL, or not at all where the receiver can read the sender's buffers (`memory.py`). Files are
another form (`files.py`). Invariants (tests/unit/bridge): what is taken is what was posted; a peer that dies or is
silent is a RuntimeError within the deadline.
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
"""Messages that a rank has under way, and buffers that it packs them or receives them in."""
WRITTEN, CORRUPTED, NOT_EXPECTED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    number: int
    slot: int
    """Of the sender's, where it packed the message."""
    checksum: tuple[int, int] | None
    """Of the content, when the push is verified."""

    def encode(self) -> Tensor:
        sums = self.checksum or (0, 0)
        return torch.tensor([self.version, self.number, self.slot, self.checksum is not None, *sums])

    @classmethod
    def decode(cls, numbers: Tensor) -> Header:
        version, number, slot, checked, *sums = numbers.tolist()
        return cls(version, number, slot, tuple(sums) if checked else None)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a message."""

    status: int
    version: int
    """That the receiver expected."""


class Deadline:
    """Of a whole push: each wait gets what is left of it."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def left(self) -> timedelta:
        """At least a millisecond: gloo takes 0 for its own default."""
        return timedelta(seconds=max(self._end - time.monotonic(), 1e-3))


class Outlet(Protocol):
    """The end that posts."""

    near: bool
    """The receiver reads this rank's buffers: every message is packed, none is sent from where it lies."""
    memory: torch.device
    """Where contents must lie."""

    def begin(self, version: int, deadline: Deadline) -> None: ...

    def post(self, message: Message, header: Header, content: Tensor) -> None:
        """Let a message (uint8) go; its content must not change until its answer has come."""

    def answer(self, message: Message, deadline: Deadline) -> Answer:
        """Wait until the receiver needs the message no more."""

    def finish(self, version: int, deadline: Deadline) -> None: ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """The end that takes."""

    near: bool
    """Messages are read where the sender has them, and need no room."""
    memory: torch.device
    """Where contents arrive."""

    def begin(self, version: int, deadline: Deadline) -> None: ...

    def expect(self, message: Message, room: Tensor | None) -> None:
        """Be ready: the content may arrive in `room` (uint8) from now on."""

    def take(self, message: Message, deadline: Deadline) -> tuple[Header, Tensor]:
        """Wait for an expected message; its content stays as it is until the answer."""

    def reply(self, message: Message, answer: Answer) -> None: ...

    def finish(self, version: int, deadline: Deadline) -> None: ...

    def close(self) -> None: ...


class GroupLine:
    """Either end, over process groups of two ranks."""

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
            control: gloo, for headers and answers.
            payload: for contents; None: the receiver reads them in the sender's `slots`.
            peer: the other's rank in the groups, 0 or 1.
            name: the other rank, for errors.
            memory: where contents lie here: gloo reads and writes that of the CPU.
        """
        self.near, self.memory = payload is None, memory
        self._control, self._payload, self._slots, self._peer, self._name = control, payload, slots, peer, name
        # Works with the memory that they read or write; each list has one owner, because a work keeps its socket open.
        self._posted: dict[int, list[tuple[Work, Tensor]]] = {}
        self._expected: dict[int, list[tuple[Work, Tensor]]] = {}
        self._replies: list[tuple[Work, Tensor]] = []

    def begin(self, version: int, deadline: Deadline) -> None:
        """The first message says it all."""

    def post(self, message: Message, header: Header, content: Tensor) -> None:
        self._posted[message.number] = works = []
        self._send(works, self._control, header.encode(), 3 * message.number)
        if self._payload is not None:
            self._send(works, self._payload, content, 3 * message.number + 1)

    def answer(self, message: Message, deadline: Deadline) -> Answer:
        works, numbers = self._posted.pop(message.number), torch.empty(2, dtype=torch.int64)
        self._receive(works, self._control, numbers, 3 * message.number + 2)
        self._wait(works, deadline)
        return Answer(*numbers.tolist())

    def expect(self, message: Message, room: Tensor | None) -> None:
        self._expected[message.number] = works = []
        self._receive(works, self._control, torch.empty(6, dtype=torch.int64), 3 * message.number)
        if self._payload is not None:
            assert room is not None
            self._receive(works, self._payload, room, 3 * message.number + 1)

    def take(self, message: Message, deadline: Deadline) -> tuple[Header, Tensor]:
        works = self._expected.pop(message.number)
        memory = [tensor for _, tensor in works]
        self._wait(works, deadline)  # the header first: NCCL's waits have no deadline
        header = Header.decode(memory[0])
        return header, self._slots[header.slot][: message.num_bytes] if self.near else memory[1]

    def reply(self, message: Message, answer: Answer) -> None:
        numbers = torch.tensor([answer.status, answer.version])
        self._send(self._replies, self._control, numbers, 3 * message.number + 2)

    def finish(self, version: int, deadline: Deadline) -> None:
        """The last replies are out."""
        self._wait(self._replies, deadline)

    def close(self) -> None:
        """A process group has closed its sockets when nobody holds it: then the other end knows."""
        if self._payload is not None and self._payload is not self._control:
            self._payload.abort()  # NCCL's kernels may stand in a message that never comes
        self._posted, self._expected, self._replies = {}, {}, []
        del self._control, self._payload

    def _send(self, works: list[tuple[Work, Tensor]], group: ProcessGroup, memory: Tensor, tag: int) -> None:
        with self._named():
            works.append((group.send([memory], self._peer, tag), memory))

    def _receive(self, works: list[tuple[Work, Tensor]], group: ProcessGroup, memory: Tensor, tag: int) -> None:
        with self._named():
            works.append((group.recv([memory], self._peer, tag), memory))

    def _wait(self, works: list[tuple[Work, Tensor]], deadline: Deadline) -> None:
        try:
            with self._named():
                for number in range(len(works)):
                    works[number][0].wait(deadline.left)
        finally:
            works.clear()  # not kept by a traceback

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"{self._name} has died, or is silent past the deadline: {error}") from error
