"""The engine's side of the bridge, without the engine: a rank takes messages and writes them into live parameters.

An engine that feeds another engine passes every stretch on as it came, and writes it at the same time. It waits for the
answer of the next engine one stretch later, and has a third buffer for this. Invariants
(tests/unit/bridge): the plan writes every parameter, or an error names the parameter; a push that is verified is read
back from the parameters and compared with the sender's checksum, so neither the transfer nor the writing can corrupt it
unseen; the version that arrives is the version that was asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.bridge.checksum import checksum
from megatron_rl.bridge.files import FileInlet
from megatron_rl.bridge.join import Joining
from megatron_rl.bridge.line import (
    CORRUPTED,
    NOT_EXPECTED,
    SLOTS,
    WRITTEN,
    Acknowledgement,
    Deadline,
    Header,
    Inlet,
    Outlet,
    Part,
    agreed_stretches,
)
from megatron_rl.bridge.memory import Slots, synchronize
from megatron_rl.bridge.messages import Message, NamedTensors, Stretch, in_place, schedule, split_messages
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.models import check_parameters


class Parameters:
    """The live parameters of an engine rank, where its weights are written."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self.forms = live
        """The shapes and dtypes of all parameters by vLLM's local names. `[]` gives the tensor that is written."""

    def __getitem__(self, name: str) -> Tensor:
        return self.forms[name]

    def begin(self, version: int, whole: bool) -> None:
        """A push begins, which is to be verified as a whole or in a sample."""

    def written(self, message: Message, verified: bool) -> None:
        """A message has been written, and may have been verified."""

    def reached(self, turn: float) -> None:
        """All messages of the turns before `turn` have been written."""

    def finish(self) -> dict[str, str]:
        """All messages of a push have been written. Returns digests of what the rank holds, by the names of the modules
        that were verified.

        Raises:
            RuntimeError: a module does not hold what it should.
        """
        return {}


class Intake:
    """One engine rank."""

    def __init__(
        self, setup: BridgeSetup, engine: int, rank: int, parameters: Parameters, device: torch.device
    ) -> None:
        """Join all trainer ranks and all other engines.

        Args:
            engine, rank: the index of the engine, and of the rank in it.

        Raises:
            ValueError: a live parameter that the plan does not know, one that is missing or of another shape
                or dtype; or ranks that do not agree on the plan.
        """
        self.parameters, self._timeout_s = parameters, setup.timeout_s
        self._side = f"engine {engine}, rank {rank}"
        self._device = device
        me, plan = setup.engine_rank(engine, rank), setup.transfer_plan
        first, hop = me, 0  # the first engine of the chain, which the trainers send to, and how far it is
        while (upstream := plan.upstream(first)) is not None:
            first, hop = upstream, hop + 1
        routes = plan.received_by(me)
        messages = [
            message
            for source, copies in routes.items()
            for message in split_messages(source, first, copies, setup.bucket_bytes)
        ]
        self.turns = turns = schedule(messages, plan.turns)
        """What a push brings in each turn."""
        turn_of = {message.key: number for number, turn in turns.items() for message in turn}
        self._schedule = list(itertools.chain.from_iterable(turns.values()))
        _check(setup, rank, parameters.forms, self._schedule, self._side)
        self._lines: dict[int, Inlet] = {}
        self._next: Outlet | None = None
        if setup.folder is not None:
            self._lines = {source: FileInlet(setup, source, me) for source in routes}
        else:
            self._join(setup, me, hop)
        split = agreed_stretches(
            turns, self._line, self._unpacks, setup.bucket_bytes, chained=setup.engines.are_chained
        )
        self.stretches = [Stretch.of(part, self._unpacks) for part in split]
        """The contents of a push, in receiving order."""
        self._turn_of = [turn_of[part[0].key] for part in split]
        """The turn of each stretch."""
        if self._next is not None or plan.upstream(me) is not None:
            # Between engines all messages share one line, and their order numbers them.
            numbers = itertools.count()
            self._passed_on = [
                Stretch(tuple(replace(m, number=next(numbers)) for m in stretch.messages), stretch.starts)
                for stretch in self.stretches
            ]
        if plan.upstream(me) is not None:
            self.stretches = self._passed_on
            self._schedule = [message for stretch in self.stretches for message in stretch.messages]
        received = [
            stretch.buffer_bytes
            for stretch in self.stretches
            if self._next is not None or not self._lines[stretch.source].near
        ]
        # A process on a CPU may push to engines on GPUs. Contents arrive on the CPU then.
        arrival = {line.memory for line in self._lines.values() if not line.near} or {self._device}
        assert len(arrival) == 1, "all trainers have one kind of device"
        num = SLOTS if self._next is None else SLOTS + 1  # the next engine may still read the one before
        self._slots = Slots(max(received, default=0), arrival.pop(), num)
        self._broken = self._verified = False

    def _join(self, setup: BridgeSetup, me: int, hop: int) -> None:
        joining, trainers = Joining(setup, setup.mesh.world_size + me, self._device), setup.mesh.world_size
        plan = setup.transfer_plan
        upstream, downstream = plan.upstream(me), plan.downstream(me)
        sources = list(dict.fromkeys(message.source for message in self._schedule))
        near = joining.readable(sources) if upstream is None else set()
        feeding = [trainers + upstream] if upstream is not None else [one for one in sources if one not in near]
        fed = [trainers + downstream] if downstream is not None else []
        joining.share_contents(outlets=dict.fromkeys(fed, hop + 1), inlets=dict.fromkeys(feeding, hop))
        if upstream is None:
            self._lines = {source: joining.inlet(source, source in near) for source in sources}
        else:
            self._lines = dict.fromkeys(sources, joining.inlet(trainers + upstream, near=False, hop=hop))
        if downstream is not None:
            self._next = joining.outlet(trainers + downstream, near=False, hop=hop + 1)

    def _line(self, message: Message) -> Inlet:
        return self._lines[message.source]

    def _unpacks(self, message: Message) -> bool:
        """Whether the message is read in a buffer, the sender's or this rank's."""
        return self._line(message).near or self._room(message, self.parameters.forms) is None

    @property
    def num_bytes(self) -> int:
        """How many bytes this rank takes in a push."""
        return sum(message.num_bytes for message in self._schedule)

    @torch.no_grad()
    def receive(self, version: int, verify: bool = False) -> dict[str, str]:
        """Write one whole push into the live parameters.

        Args:
            verify: the whole push is verified, as the trainers do it too. The first push always is.

        Returns:
            Digests of what the rank now holds; see `Parameters.finish`.

        Raises:
            RuntimeError: a rank died, stalled past the deadline, or pushed another version; or the bytes differ from
                the sent ones. The parameters are a mix of versions then, and all ranks must join again.
        """
        if self._broken:
            raise RuntimeError(f"{self._side}: an earlier push broke off; join the bridge again")
        try:
            self.parameters.begin(version, verify or not self._verified)
            digests = self._receive(version, Deadline(self._timeout_s))
        except BaseException:
            self.close()  # the other ends fail at once, not at their deadlines
            raise
        self._verified = True
        return digests

    def _receive(self, version: int, deadline: Deadline) -> dict[str, str]:
        lines = set(self._lines.values())
        for line in lines:
            line.begin(version, deadline)
        if self._next is not None:
            self._next.begin(version, deadline)
        for index in range(min(SLOTS, len(self.stretches))):
            self._expect(index)
        for index in range(len(self.stretches)):
            self.parameters.reached(self._turn_of[index])
            self._complete(index, version, deadline)
            if self._next is not None and index > 0:  # not this stretch: it is on its way to the next engine
                self._settle(self._passed_on[index - 1], version, deadline)
            if index + SLOTS < len(self.stretches):
                self._expect(index + SLOTS)
        if self._next is not None:
            self._settle(self._passed_on[-1], version, deadline)
            self._next.finish(version, deadline)
        for line in lines:
            line.finish(version, deadline)
        return self.parameters.finish()

    def _expect(self, index: int) -> None:
        stretch = self.stretches[index]
        line = self._lines[stretch.source]
        line.expect(stretch, [] if line.near else self._rooms(index))

    def _rooms(self, index: int) -> list[Tensor]:
        """The memory that holds a stretch's contents until they are written: the parameters, or a buffer."""
        slot, rooms = self._slots.tensors[index % len(self._slots.tensors)], []
        for message, start in zip(self.stretches[index].messages, self.stretches[index].starts, strict=True):
            room = self._room(message, self.parameters)
            if room is None:
                assert start is not None, "a parameter has been laid out again since the bridge was joined"
                room = slot[start : start + message.num_bytes]
            rooms.append(room)
        return rooms

    def _room(self, message: Message, parameters: NamedTensors) -> Tensor | None:
        """The parameter itself, if the content can arrive there in the form that is sent."""
        arrives_here = self._lines[message.source].memory == self._device
        return in_place(message, message.destinations(parameters)) if arrives_here else None

    def _complete(self, index: int, version: int, deadline: Deadline) -> None:
        stretch = self.stretches[index]
        line = self._lines[stretch.source]
        parts = line.take(stretch, deadline)
        for message, (header, _) in zip(stretch.messages, parts, strict=True):
            if (header.version, header.number) != (version, message.number):
                self._refuse(line, stretch, Acknowledgement(NOT_EXPECTED, version, message.number), deadline)
                raise RuntimeError(
                    f"{self._side} was to receive version {version}, trainer rank {message.source} pushed version "
                    f"{header.version} (message {header.number} for {message.number}); push and receive must name the "
                    "same version"
                )
        if self._next is not None:
            parts = self._pass_on(index, parts, near=line.near)
        for message, (header, content) in zip(stretch.messages, parts, strict=True):
            if not self._write(message, header, content):
                self._refuse(line, stretch, Acknowledgement(CORRUPTED, version, message.number), deadline)
                raise RuntimeError(
                    f"{self._side} holds other bytes than trainer rank {message.source} sent, in message "
                    f"{message.number} of version {version}: "
                    f"{', '.join(copy.destination_name for copy in message.copies[:3])}"
                )
            self.parameters.written(message, header.checksum is not None)
        line.acknowledge(stretch, Acknowledgement(WRITTEN, version, stretch.number))

    def _pass_on(self, index: int, parts: list[Part], near: bool) -> list[Part]:
        """Post a stretch to the next engine. A stretch in the sender's memory is copied first, because the sender is
        answered before the next engine has the stretch."""
        assert self._next is not None
        if near:
            rooms = self._rooms(index)
            torch._foreach_copy_(rooms, [content for _, content in parts])
            parts = [(header, room) for (header, _), room in zip(parts, rooms, strict=True)]
        passed = self._passed_on[index]
        self._next.post(
            passed,
            (
                (replace(header, number=message.number, slot=0), content)
                for message, (header, content) in zip(passed.messages, parts, strict=True)
            ),
        )
        return parts

    def _settle(self, passed: Stretch, version: int, deadline: Deadline) -> None:
        """Wait until the next engine does not need a stretch any more."""
        assert self._next is not None
        if self._next.acknowledgement(passed, deadline).status != WRITTEN:
            raise RuntimeError(f"{self._side} fed an engine that refused version {version}; its own error says why")

    def _write(self, message: Message, header: Header, content: Tensor) -> bool:
        """Write the content. Whether the parameters hold what was sent, if the push is verified; otherwise True."""
        views = message.destinations(self.parameters)
        if content.data_ptr() != views[0].data_ptr():
            torch._foreach_copy_(views, message.parts(content))
        synchronize(self._device)
        if header.checksum is None:
            return True
        if content.data_ptr() != views[0].data_ptr():
            torch._foreach_copy_(message.parts(content), views)  # read back, into the message's own memory
        return checksum(content) == header.checksum

    def _refuse(self, line: Inlet, stretch: Stretch, acknowledgement: Acknowledgement, deadline: Deadline) -> None:
        line.acknowledge(stretch, acknowledgement)
        with suppress(RuntimeError):  # the sender has read the refusal, and has closed its end
            line.finish(acknowledgement.version, deadline)

    def close(self) -> None:
        self._broken = True
        lines: set[Inlet | Outlet] = {*self._lines.values(), *filter(None, [self._next])}
        for line in lines:
            line.close()
        self._lines, self._next = {}, None
        self._slots.close()


def _check(setup: BridgeSetup, rank: int, forms: Mapping[str, Tensor], messages: list[Message], side: str) -> None:
    check_parameters(setup.engine_shards(rank), {name: tuple(form.shape) for name, form in forms.items()}, side)
    for copy in (copy for message in messages for copy in message.copies):
        dtype = forms[copy.destination_name].dtype
        if dtype != getattr(torch, copy.dtype):
            raise ValueError(f"{side}: {copy.destination_name} is {dtype}, the bridge brings {copy.dtype}")
