"""How messages pass from one rank to another: one small port, and its form over process groups.

A line joins two ranks. One end posts stretches of messages; the other end takes them and acknowledges each stretch. A
rank has two stretches in flight: the acknowledgement of stretch i frees the buffer that stretch i + 2 is packed into.
The headers of a stretch and its acknowledgement pass over gloo. The contents pass over gloo or NCCL, or they stay where
they are if the receiver can read the sender's buffers (`memory.py`). Files are another form of the port (`files.py`).

No rank waits for a send. When a connection breaks, gloo ends the receives that have no byte yet. It forgets a send that
it has begun to write, and a receive that it has begun to read: a rank that waited for one of these would wait until its
deadline. So the contents of a stretch are sent before its headers, and the receiver waits for the headers, which are
one message; the sender waits for the acknowledgement; and an end mark tells the receiver that its last acknowledgements
have arrived. These messages have at most a few kilobytes; a break in the middle of one is seen at the deadline.

Invariants (tests/unit/bridge): what is taken is what was posted; a peer that dies is a RuntimeError at once, also in
the middle of a content; a peer that is silent is a RuntimeError within the deadline.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from megatron_rl.bridge.messages import Message, Stretch, stretches

SLOTS = 2
"""The number of stretches that a rank has in flight, and of its buffers for packing or receiving."""
WRITTEN, CORRUPTED, NOT_EXPECTED = 0, 1, 2
HEADERS, CONTENT, ACKNOWLEDGEMENT = 2, 3, 4
"""Message i has the tags 3 i + 2, 3 i + 3 and 3 i + 4. Headers and acknowledgement of a stretch have the tags of its
last message."""
END, PACKED = 0, 1
"""The tags of the end mark of a push, and of what both ends tell each other when they join."""
HEADER_NUMBERS = 6
"""How many numbers a header is."""
POLL_S = 1e-4
"""How often a receiver looks for a content that travels. 64 MiB take 1.3 ms at 50 GB/s."""


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    number: int
    slot: int
    """The sender's buffer that holds the packed message, if the receiver reads it there."""
    checksum: tuple[int, int] | None
    """The checksum of the content, if the push is verified."""

    def encode(self) -> list[int]:
        return [self.version, self.number, self.slot, self.checksum is not None, *(self.checksum or (0, 0))]

    @classmethod
    def decode(cls, numbers: list[int]) -> Header:
        version, number, slot, checked, first, second = numbers
        return cls(version, number, slot, (first, second) if checked else None)


Part = tuple[Header, Tensor]
"""A message as it passes over a line, with its content (uint8)."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """It tells the sender what became of a stretch."""

    status: int
    version: int
    """The version that the receiver expected."""
    number: int
    """The last written message, or the message that differs from what was sent."""


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

    def agree(self, packs: Sequence[bool]) -> list[bool]:
        """Tells, message by message, whether this end packs it (`packs`) or the other one unpacks it."""

    def begin(self, version: int, deadline: Deadline) -> None: ...

    def post(self, stretch: Stretch, parts: Iterable[Part]) -> None:
        """Send the messages of a stretch. Their contents must not change until it is acknowledged."""

    def acknowledgement(self, stretch: Stretch, deadline: Deadline) -> Acknowledgement:
        """Wait until the receiver does not need the stretch any more."""

    def finish(self, version: int, deadline: Deadline) -> None:
        """Tell the receiver that all its acknowledgements have arrived."""

    def close(self) -> None: ...


class Inlet(Protocol):
    """The end that takes."""

    near: bool
    """Messages are read in the sender's buffers, and need no room here."""
    memory: torch.device
    """Contents arrive in the memory of this device."""

    def agree(self, packs: Sequence[bool]) -> list[bool]:
        """Tells, message by message, whether this end unpacks it (`packs`) or the other one packs it."""

    def begin(self, version: int, deadline: Deadline) -> None: ...

    def expect(self, stretch: Stretch, rooms: Sequence[Tensor]) -> None:
        """Be ready: from now on the contents may arrive in `rooms` (uint8), one for each message. A near line has
        none."""

    def take(self, stretch: Stretch, deadline: Deadline) -> list[Part]:
        """Wait for an expected stretch. Its contents stay as they are until it is acknowledged."""

    def acknowledge(self, stretch: Stretch, acknowledgement: Acknowledgement) -> None: ...

    def finish(self, version: int, deadline: Deadline) -> None:
        """Wait until the sender has all acknowledgements."""

    def close(self) -> None: ...


def agreed_stretches(
    turns: Mapping[int, Sequence[Message]],
    line: Callable[[Message], Outlet | Inlet],
    packs: Callable[[Message], bool],
    bucket_bytes: int,
    *,
    chained: bool,
) -> list[list[Message]]:
    """Split the turns of a rank into stretches, the same ones as at the other ends of its lines.

    Args:
        turns: the turns of `messages.schedule`.
        line: the line over which a message passes.
        packs: whether this rank packs (unpacks) a message. The other ends are asked for theirs.
        chained: engines feed engines. Then every message counts as packed and nobody is asked: stretches are short,
            because an engine passes a stretch on when it has the whole of it.
    """
    packed: dict[tuple[int, int, int], bool] = {}
    by_line: dict[Outlet | Inlet, list[Message]] = {}
    for message in itertools.chain.from_iterable(turns.values()):
        packed[message.key] = True
        by_line.setdefault(line(message), []).append(message)
    for end, own in [] if chained else by_line.items():
        agreed = end.agree([packs(message) for message in own])
        packed |= zip((message.key for message in own), agreed, strict=True)
    return [
        part for turn in turns.values() for part in stretches(turn, lambda message: packed[message.key], bucket_bytes)
    ]


class MessageGroup(Protocol):
    """What a line needs of a process group. torch's types do not say that its backends have it."""

    def send(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int, /) -> Work: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Work | None: ...

    def abort(self) -> None: ...


class Contents:
    """A process group over which contents pass. A line over gloo has a group of its own, the one of its headers. All
    GPUs together have one NCCL communicator, where the sends of a rank follow each other in the order of posting, and
    so do its receives. At every rank this is the global order of stretches, so they meet. An engine of a chain would
    also send what it passes on behind a receive of something later; so it sends on a second communicator."""

    def __init__(self, group: MessageGroup, ranks: Mapping[int, int] | None = None) -> None:
        """
        Args:
            ranks: the rank in the group of each bridge rank; None: the group has two ranks.
        """
        self._group: MessageGroup | None = group
        self.ranks = ranks

    @property
    def group(self) -> MessageGroup:
        assert self._group is not None, "nothing is sent after `abort`"
        return self._group

    def abort(self) -> None:
        """End what other ranks wait for: NCCL's kernels may stand in a message that never comes."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class GroupLine:
    """What both ends over process groups have in common."""

    def __init__(
        self,
        control: MessageGroup,
        contents: Contents | None,
        *,
        peer: int,
        rank: int,
        name: str,
        memory: torch.device,
        slots: Sequence[Tensor] = (),
    ) -> None:
        """
        Args:
            control: gloo between the two ranks, for headers and acknowledgements.
            contents: None: the receiver reads them in the sender's `slots`.
            peer: the other's rank in `control`, 0 or 1.
            rank: the other's rank in the bridge.
            name: what errors call the other rank.
            memory: where contents lie here; gloo reads and writes the memory of the CPU.
        """
        self.near, self.memory = contents is None, memory
        self._control, self._contents, self._slots, self._peer, self._name = control, contents, slots, peer, name
        self._place = peer if contents is None or contents.ranks is None else contents.ranks[rank]
        """The other's rank in the group of the contents."""
        # Works with the memory that they read or write. A work keeps its group's socket open, so `close` forgets all.
        self._stretches: dict[int, list[tuple[Work, Tensor]]] = {}
        self._headers: dict[int, list[tuple[Work, Tensor]]] = {}
        self._acknowledgements: list[tuple[Work, Tensor]] = []
        self._mark: list[tuple[Work, Tensor]] = []
        self._said: list[tuple[Work, Tensor]] = []

    def agree(self, packs: Sequence[bool]) -> list[bool]:
        """
        Raises:
            RuntimeError: the other end died while it joined.
        """
        mine, theirs = torch.tensor(packs, dtype=torch.uint8), torch.empty(len(packs), dtype=torch.uint8)
        heard: list[tuple[Work, Tensor]] = []
        self._send(self._said, mine, PACKED)
        self._receive(heard, theirs, PACKED)
        with self._named():
            heard.pop()[0].wait()  # within the time that the group gives a connection
        return (mine | theirs).bool().tolist()

    def close(self) -> None:
        """A process group closes its sockets when nothing refers to it any more. The other end fails then."""
        if self._contents is not None and self._contents.ranks is not None:
            self._contents.abort()
        stretches = (*self._stretches.values(), *self._headers.values())
        for works in (*stretches, self._acknowledgements, self._mark, self._said):
            works.clear()  # a traceback may refer to the list
        del self._control, self._contents

    def _send(self, works: list[tuple[Work, Tensor]], memory: Tensor, tag: int) -> None:
        with self._named():
            works.append((self._control.send([memory], self._peer, tag), memory))

    def _receive(self, works: list[tuple[Work, Tensor]], memory: Tensor, tag: int) -> None:
        with self._named():
            works.append((self._control.recv([memory], self._peer, tag), memory))

    def _wait(self, works: list[tuple[Work, Tensor]], deadline: Deadline, polled: bool = False) -> None:
        """Wait for receives, in their order.

        Args:
            polled: they are NCCL's, whose wait has no deadline: it makes the current stream wait, and a message that
                stops half-way would hold this process until torch ends it.
        """
        try:
            with self._named():
                for number in range(len(works)):
                    while polled and not works[number][0].is_completed():
                        if deadline.over:
                            raise RuntimeError("a message has stopped on its way")
                        time.sleep(POLL_S)
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

    def post(self, stretch: Stretch, parts: Iterable[Part]) -> None:
        self._stretches[stretch.number] = works = []
        headers: list[list[int]] = []
        for message, (header, content) in zip(stretch.messages, parts, strict=True):
            if self._contents is not None:
                with self._named():
                    work = self._contents.group.send([content], self._place, 3 * message.number + CONTENT)
                works.append((work, content))
            headers.append(header.encode())
        self._send(works, torch.tensor(headers), 3 * stretch.number + HEADERS)

    def acknowledgement(self, stretch: Stretch, deadline: Deadline) -> Acknowledgement:
        works: list[tuple[Work, Tensor]] = []
        numbers = torch.empty(3, dtype=torch.int64)
        self._receive(works, numbers, 3 * stretch.number + ACKNOWLEDGEMENT)
        self._wait(works, deadline)
        del self._stretches[stretch.number]  # the receiver has all of it
        return Acknowledgement(*numbers.tolist())

    def finish(self, version: int, deadline: Deadline) -> None:
        """gloo writes the mark at once: the receiver posted its receive before it acknowledged anything."""
        self._send(self._mark, torch.zeros(1), END)


class GroupInlet(GroupLine):
    def begin(self, version: int, deadline: Deadline) -> None:
        self._receive(self._mark, torch.empty(1), END)

    def expect(self, stretch: Stretch, rooms: Sequence[Tensor]) -> None:
        self._stretches[stretch.number] = contents = []
        self._headers[stretch.number] = []
        if self._contents is not None:
            for message, room in zip(stretch.messages, rooms, strict=True):
                with self._named():
                    work = self._contents.group.recv([room], self._place, 3 * message.number + CONTENT)
                contents.append((work, room))
        numbers = torch.empty(len(stretch.messages), HEADER_NUMBERS, dtype=torch.int64)
        self._receive(self._headers[stretch.number], numbers, 3 * stretch.number + HEADERS)

    def take(self, stretch: Stretch, deadline: Deadline) -> list[Part]:
        """The headers are waited for first: over gloo the contents have arrived before them."""
        headers, arriving = self._headers[stretch.number], self._stretches[stretch.number]
        numbers, contents = headers[0][1], [room for _, room in arriving]
        self._wait(headers, deadline)
        self._wait(arriving, deadline, polled=self._contents is not None and self._contents.ranks is not None)
        del self._headers[stretch.number], self._stretches[stretch.number]
        decoded = [Header.decode(row) for row in numbers.tolist()]
        if self.near:
            slot = self._slots[decoded[0].slot]
            contents = [
                slot[start : start + message.num_bytes]
                for message, start in zip(stretch.messages, stretch.starts, strict=True)
                if start is not None  # a near line packs all
            ]
        return list(zip(decoded, contents, strict=True))

    def acknowledge(self, stretch: Stretch, acknowledgement: Acknowledgement) -> None:
        numbers = torch.tensor([acknowledgement.status, acknowledgement.version, acknowledgement.number])
        self._send(self._acknowledgements, numbers, 3 * stretch.number + ACKNOWLEDGEMENT)

    def finish(self, version: int, deadline: Deadline) -> None:
        self._wait(self._mark, deadline)
        self._acknowledgements = []
