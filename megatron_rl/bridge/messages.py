"""Routes are split into messages: pure values, and the tensors that each message reads and writes.

A message is what one trainer rank sends to one engine rank at once. All ranks send and receive their messages in one
global order, so two buffers a rank are enough and the ranks cannot wait for each other in a circle. Invariants
(tests/unit/bridge): the messages of a route hold its copies in their order and each byte once; a message exceeds the
bucket only if it is a single row; the messages that two ranks have in common stand in the same order in both schedules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_rl.bridge.verification import is_sampled
from megatron_rl.layout import Copy, Turn, slices

ALONE_BYTES = 2**24
"""A copy of this size or more is a message of its own: if it is contiguous, it need not be packed. Smaller ones travel
together, because each message costs both ends an answer: a rank of Qwen3-235B's engines gets 940 messages with this
bound, and 5,083 with one of a mebibyte."""


class Named(Protocol):
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

    @cached_property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self.copies)

    def is_sampled(self, version: int) -> bool:
        """Whether the push as `version` is verified in a module to which this message brings something."""
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

    def sources(self, parameters: Named) -> list[Tensor]:
        return [parameters[copy.source_name].detach()[slices(copy.source_box)] for copy in self.copies]

    def destinations(self, parameters: Named) -> list[Tensor]:
        """Views with the dims of the sources: a stack of experts has one dim more."""
        views = []
        for copy in self.copies:
            extents = [stop - begin for begin, stop in copy.source_box]
            views.append(parameters[copy.destination_name].detach()[slices(copy.destination_box)].view(extents))
        return views


class Sized(NamedTuple):
    """A message without its content."""

    source: int
    destination: int
    number: int
    num_bytes: int


OneMessage = TypeVar("OneMessage", Message, Sized)


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
    for copy in (piece for copy in copies for piece in copy.rows(bucket_bytes)):
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


def schedule(messages: Iterable[OneMessage], turns: Mapping[tuple[int, int], Sequence[Turn]]) -> list[OneMessage]:
    """The global order: that of the plan's turns, in which few ranks wait for each other. A message belongs to the turn
    in which its middle byte is sent. Each rank orders its own messages.

    Args:
        messages: all messages of some routes.
        turns: `TransferPlan.turns`.
    """
    by_route: dict[tuple[int, int], list[OneMessage]] = {}
    for message in messages:
        by_route.setdefault((message.source, message.destination), []).append(message)
    keyed: list[tuple[int, int, OneMessage]] = []
    for route, own in by_route.items():
        of_route, sent = iter(turns[route]), 0
        turn = next(of_route)
        for message in sorted(own, key=lambda message: message.number):
            while turn.stop < sent + message.num_bytes / 2:
                turn = next(of_route)
            keyed.append((turn.number, message.number, message))
            sent += message.num_bytes
    return [message for *_, message in sorted(keyed, key=lambda entry: entry[:2])]


def late_last(messages: Iterable[Message], late: Collection[int]) -> list[Message]:
    """The order of a push for which some engine ranks are late: they get their messages after all others. All trainer
    ranks must have the same `late`. The order of what one engine rank gets is that of `messages`, so the engines need
    not know."""
    return sorted(messages, key=lambda message: message.destination in late)
