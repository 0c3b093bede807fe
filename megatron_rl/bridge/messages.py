"""Routes are split into messages, and messages are joined into stretches: pure values, and the tensors that each
message reads and writes.

A message is what one trainer rank sends to one engine rank at once. A stretch is a run of messages that has one answer.
All ranks send and receive their stretches in one global order, so two buffers a rank are enough and the ranks cannot
wait for each other in a circle.

The proof: look at the first stretch of this order that is not acknowledged on its whole way. Before its sender posts
it, the sender waits only for acknowledgements of earlier stretches, and has all of them. Before a receiver is ready for
it, the receiver waits only until it has written earlier stretches, and until the next engine of its chain has
acknowledged these; it has all of that too. So the stretch is posted, passed on to the end of its chain, and written. A
layer that all ranks of an engine repack together is a point of the same order, so none waits there for a later stretch.
Each receiver acknowledges what it has written without asking the next engine: an engine that acknowledged only after
the next one would make an acknowledgement depend on a later stretch. In a push with late engines their stretches come
last (`late_last`), with all ranks of an engine, and in the same sequence for each engine.

Invariants (tests/unit/bridge): the messages of a route hold its copies in their order and each byte once; a message
exceeds the bucket only if it is a single row; what an end packs in a stretch exceeds the bucket only if it is a single
message; the stretches that two ranks have in common are the same at both, and stand in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.bridge.verification import is_sampled
from megatron_rl.layout import Copy, Turn
from megatron_rl.models import slices

ALONE_BYTES = 2**22
"""A copy of this size or more is a message of its own: if it is contiguous, it need not be packed. Smaller ones travel
together."""
STRETCH_BUCKETS = 8
"""The largest number of buckets in a stretch, unless it is a single message: a layer that vLLM repacks needs memory as
soon as a stretch of it is expected."""
ALIGNMENT_BYTES = 64
"""Messages begin at multiples of this in a buffer."""


class NamedTensors(Protocol):
    """Tensors by name."""

    def __getitem__(self, name: str, /) -> Tensor: ...


@dataclass(frozen=True)
class Message:
    source: int
    destination: int
    """The engine rank, as the transfer plan counts."""
    number: int
    """The place in its route, from 0."""
    copies: tuple[Copy, ...]
    """The copies with the wider elements come first: all are aligned then."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self.source, self.destination, self.number

    @cached_property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self.copies)

    def is_sampled(self, version: int) -> bool:
        """Whether the push as `version` is verified in a module that receives bytes of this message."""
        modules = {copy.destination_name.rpartition(".")[0] for copy in self.copies}
        return any(is_sampled(module, version) for module in modules)

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """Views of the copies' rectangles, which lie one after the other in `buffer` (uint8)."""
        parts, start = [], 0
        for copy in self.copies:
            flat = buffer[start : start + copy.num_bytes].view(getattr(torch, copy.dtype))
            parts.append(flat.view([stop - begin for begin, stop in copy.source_box]))
            start += copy.num_bytes
        return parts

    def sources(self, parameters: NamedTensors) -> list[Tensor]:
        return [parameters[copy.source_name].detach()[slices(copy.source_box)] for copy in self.copies]

    def destinations(self, parameters: NamedTensors) -> list[Tensor]:
        """Views with the dims of the sources: a stack of experts has one dim more."""
        views = []
        for copy in self.copies:
            extents = [stop - begin for begin, stop in copy.source_box]
            views.append(parameters[copy.destination_name].detach()[slices(copy.destination_box)].view(extents))
        return views


@dataclass(frozen=True)
class Stretch:
    """Messages of one turn that follow each other at the sender and at the receiver. The receiver answers once, when it
    has written all of them."""

    messages: tuple[Message, ...]
    starts: tuple[int | None, ...]
    """The byte of this rank's buffer at which each message begins; None: the message needs no buffer at this rank."""

    @property
    def source(self) -> int:
        return self.messages[0].source

    @property
    def destination(self) -> int:
        return self.messages[0].destination

    @property
    def number(self) -> int:
        """The number of its last message: the answer tells that all messages of the line up to this one are written."""
        return self.messages[-1].number

    @property
    def buffer_bytes(self) -> int:
        """How much of a buffer it needs."""
        ends = (start + m.num_bytes for m, start in zip(self.messages, self.starts, strict=True) if start is not None)
        return max(ends, default=0)

    @classmethod
    def of(cls, messages: Iterable[Message], needs_place: Callable[[Message], bool]) -> Stretch:
        """Lay the messages that need a place in the buffer one after the other."""
        starts: list[int | None] = []
        filled, messages = 0, tuple(messages)
        for message in messages:
            if needs_place(message):
                starts.append(filled)
                filled += aligned(message.num_bytes)
            else:
                starts.append(None)
        return cls(messages, tuple(starts))


def aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def in_place(message: Message, views: Sequence[Tensor]) -> Tensor | None:
    """The message's bytes (uint8) where they lie, or None if they do not lie there as they are sent."""
    if len(views) == 1 and views[0].is_contiguous() and views[0].dtype == getattr(torch, message.copies[0].dtype):
        return views[0].view(-1).view(torch.uint8)
    return None


def split_messages(source: int, destination: int, copies: Iterable[Copy], bucket_bytes: int) -> list[Message]:
    """Split a route into messages of at most `bucket_bytes`, or of one row."""
    return [
        Message(source, destination, number, tuple(sorted(part, key=lambda copy: copy.dtype != "float32")))
        for number, part in enumerate(_fill(copies, bucket_bytes))
    ]


def _fill(copies: Iterable[Copy], bucket_bytes: int) -> Iterator[list[Copy]]:
    bucket: list[Copy] = []
    filled = 0
    for copy in (piece for whole in copies for piece in whole.rows(bucket_bytes)):
        alone = copy.num_bytes >= ALONE_BYTES
        if bucket and (alone or filled + copy.num_bytes > bucket_bytes):
            yield bucket
            bucket, filled = [], 0
        bucket.append(copy)
        filled += copy.num_bytes
        if alone:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def schedule(messages: Iterable[Message], turns: Mapping[tuple[int, int], Sequence[Turn]]) -> dict[int, list[Message]]:
    """The global order follows the plan's turns, where few ranks wait for each other. A message belongs to the turn
    that sends its middle byte. Each rank orders its own messages.

    Args:
        messages: all messages of some routes.
        turns: `TransferPlan.turns`.

    Returns:
        The messages of each turn by its number, in order. A turn has one sender and one receiver.
    """
    by_route: dict[tuple[int, int], list[Message]] = {}
    for message in messages:
        by_route.setdefault((message.source, message.destination), []).append(message)
    by_turn: dict[int, list[Message]] = {}
    for route, own in by_route.items():
        of_route, sent = iter(turns[route]), 0
        turn = next(of_route)
        for message in sorted(own, key=lambda message: message.number):
            while turn.stop < sent + message.num_bytes / 2:
                turn = next(of_route)
            by_turn.setdefault(turn.number, []).append(message)
            sent += message.num_bytes
    return dict(sorted(by_turn.items()))


def stretches(turn: Iterable[Message], packed: Callable[[Message], bool], bucket_bytes: int) -> Iterator[list[Message]]:
    """Split a turn so that what is packed in each stretch fits into one buffer, and all of it into `STRETCH_BUCKETS`.

    Args:
        packed: whether the sender packs the message or the receiver unpacks it. Both must know this of both.
    """
    stretch: list[Message] = []
    filled = total = 0
    for message in turn:
        needed = aligned(message.num_bytes) if packed(message) else 0
        if stretch and (
            (needed and filled and filled + needed > bucket_bytes)
            or total + message.num_bytes > STRETCH_BUCKETS * bucket_bytes
        ):
            yield stretch
            stretch, filled, total = [], 0, 0
        stretch.append(message)
        filled += needed
        total += message.num_bytes
    if stretch:
        yield stretch


def late_last(order: Iterable[Stretch], late: Collection[int]) -> list[Stretch]:
    """The order of a push with late engine ranks: they get their stretches after all others. All trainer
    ranks must have the same `late`. Each engine rank receives its stretches in the sequence of `order`, so the engines
    need not know."""
    return sorted(order, key=lambda stretch: stretch.destination in late)
