"""The trainer's side of the bridge: each Megatron rank sends its own shards to the engine ranks that need them.

No rank gathers a tensor, and among replicas only the one that the plan names sends a shard. A large contiguous copy is
sent from where it lies; the others are packed, or made of a weight and its adapters, while the message before them
travels. Invariants (tests/unit/bridge):
the table of shards covers every parameter of the rank, by name and shape; when a push returns, all its receivers have
written all of it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl import spans
from megatron_rl.bridge.checksum import checksum
from megatron_rl.bridge.files import FileOutlet
from megatron_rl.bridge.join import Joining
from megatron_rl.bridge.line import CORRUPTED, NOT_EXPECTED, SLOTS, Deadline, Header, Outlet, Part, agreed_stretches
from megatron_rl.bridge.memory import Slots, synchronize
from megatron_rl.bridge.messages import Message, Stretch, aligned, in_place, late_last, schedule, split_messages
from megatron_rl.bridge.setup import BridgeSetup
from megatron_rl.models import Box, check_parameters
from megatron_rl.types import Metrics


class BridgeSender:
    """One trainer rank. The parameters are live: each push sends the values that they hold at that time."""

    def __init__(
        self,
        setup: BridgeSetup,
        rank: int,
        parameters: Mapping[str, Tensor],
        made: Mapping[str, Callable[[Box, Tensor], None]] | None = None,
    ) -> None:
        """Join all other trainer ranks and all engines.

        Args:
            rank: the global trainer rank, as `Mesh.coordinates` counts it.
            parameters: the rank's own shards, by the local names of its shards (`BridgeSetup.trainer_shards`).
            made: a writer for each derived parameter: it fills the send buffer with one rectangle, in every push. Ranks
                that hold the same rectangle must write the same bits, because the plan may cut it anywhere.

        Raises:
            ValueError: a parameter that the plan does not know, one that is missing or of another shape; or
                ranks that do not agree on the plan.
        """
        shards = setup.trainer_shards(rank)
        live = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        check_parameters(shards, live, f"trainer rank {rank}")
        self._parameters, self._rank, self._timeout_s = parameters, rank, setup.timeout_s
        self._made = made or {}
        self._engines = setup.engines
        self._device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        routes = setup.transfer_plan.sent_by(rank)
        messages = [m for to, copies in routes.items() for m in split_messages(rank, to, copies, setup.bucket_bytes)]
        turns = schedule(messages, setup.transfer_plan.turns)
        self._schedule = list(itertools.chain.from_iterable(turns.values()))
        peers = list(dict.fromkeys(message.destination for message in self._schedule))
        self._lines: dict[int, Outlet]
        if setup.folder is not None:
            self._lines = {to: FileOutlet(setup, rank, to) for to in peers}
            packed = set() if self._device == FileOutlet.memory else set(peers)
            self._slots = Slots(self._most_packed(turns, packed, setup.bucket_bytes), FileOutlet.memory)
        else:
            joining, first = Joining(setup, rank, self._device), setup.mesh.world_size
            near = {peer - first for peer in joining.readers(first + to for to in peers)}
            self._slots = Slots(self._most_packed(turns, near, setup.bucket_bytes), self._device)
            if near:
                joining.offer(self._slots)
            joining.share_contents(outlets={first + to: 0 for to in peers if to not in near}, inlets={})
            self._lines = {to: joining.outlet(first + to, to in near) for to in peers}
            for to, line in self._lines.items():
                if line.memory != self._device:
                    raise ValueError(f"trainer rank {rank} has its weights on a GPU, engine rank {to} has none")
        split = agreed_stretches(turns, self._line, self._packs, setup.bucket_bytes, chained=setup.engines.are_chained)
        self.stretches = [Stretch.of(messages, self._packs) for messages in split]
        """The contents of a push, in sending order."""
        self._verified = self._broken = False

    def _line(self, message: Message) -> Outlet:
        return self._lines[message.destination]

    def _packs(self, message: Message) -> bool:
        """Whether the message cannot be sent from where it lies."""
        line = self._line(message)
        return line.near or line.memory != self._device or self._in_place(message) is None

    def _in_place(self, message: Message) -> Tensor | None:
        """The message's bytes where they lie, or None if they must be packed or made."""
        if any(one.source_name in self._made for one in message.copies):
            return None
        return in_place(message, message.sources(self._parameters))

    def _most_packed(self, turns: Mapping[int, Sequence[Message]], always: set[int], bucket_bytes: int) -> int:
        """No stretch needs a larger buffer for any receiver. Every message to `always` must be packed."""
        most = 0
        for turn in turns.values():
            needed = [
                aligned(message.num_bytes)
                for message in turn
                if message.destination in always or self._in_place(message) is None
            ]
            most = max(most, *needed, min(bucket_bytes, sum(needed)))
        return most

    @property
    def num_bytes(self) -> int:
        """How many bytes this rank sends in a push."""
        return sum(message.num_bytes for message in self._schedule)

    @torch.no_grad()
    def push(self, version: int, verify: bool = False, late: Collection[int] = ()) -> Metrics:
        """Send the weights as `version`, and return when every engine rank that this rank serves has written them.

        Args:
            verify: the whole push is verified, not only a sample of it: the receivers read back what they wrote and
                compare its checksums with this side's. The first push is always verified.
            late: the engines, by their indices, that get their weights after all others, because they are not ready
                yet. All trainer ranks must have the same.

        Returns:
            `bytes` that this rank sent, and `seconds` that this took.

        Raises:
            RuntimeError: an engine died, did not take the weights within the deadline, expected another version or
                holds other bytes than were sent. All ranks must join again.
        """
        if self._broken:
            raise RuntimeError(f"trainer rank {self._rank}: an earlier push broke off; join the bridge again")
        start, deadline = time.perf_counter(), Deadline(self._timeout_s)
        try:
            self._push(version, verify or not self._verified, late_last(self.stretches, self._ranks(late)), deadline)
        except BaseException:
            self.close()  # the other ends fail at once, not at their deadlines
            raise
        self._verified = True
        return {"seconds": time.perf_counter() - start, "bytes": self.num_bytes}

    def _ranks(self, late: Collection[int]) -> set[int]:
        """The engine ranks that the trainers feed, and that are late or feed engines that are."""
        engines = self._engines
        chains = [chain for chain in engines.chains if not set(late).isdisjoint(chain)]
        return {chain[0] * engines.world_size + rank for chain in chains for rank in range(engines.world_size)}

    def _push(self, version: int, verify: bool, order: Sequence[Stretch], deadline: Deadline) -> None:
        for line in self._lines.values():
            line.begin(version, deadline)
        last = {stretch.destination: stretch for stretch in order}

        def settle(stretch: Stretch) -> None:
            self._settle(stretch, version, deadline)
            if stretch is last[stretch.destination]:
                self._lines[stretch.destination].finish(version, deadline)

        for index, stretch in enumerate(order):
            if index >= SLOTS:
                settle(order[index - SLOTS])
            with spans.span("post", stretch.destination):
                parts = self._parts(stretch, index % SLOTS, version, verify)
                self._lines[stretch.destination].post(stretch, parts)
        for stretch in order[-SLOTS:]:
            settle(stretch)

    def _parts(self, stretch: Stretch, slot: int, version: int, verify: bool) -> Iterator[Part]:
        for message, start in zip(stretch.messages, stretch.starts, strict=True):
            content = self._content(message, slot, start)
            sums = checksum(content) if verify or message.is_sampled(version) else None
            yield Header(version, message.number, slot, sums), content

    def _content(self, message: Message, slot: int, start: int | None) -> Tensor:
        """The message's bytes (uint8), where they lie, packed or made."""
        if start is None:
            content = self._in_place(message)
            assert content is not None, "a parameter has been laid out again since the bridge was joined"
            return content
        content = self._slots.tensors[slot][start : start + message.num_bytes]
        parts, views = message.parts(content), message.sources(self._parameters)
        for one, part in zip(message.copies, parts, strict=True):
            if one.source_name in self._made:
                self._made[one.source_name](one.source_box, part)
        lying = [i for i, one in enumerate(message.copies) if one.source_name not in self._made]
        if lying:
            torch._foreach_copy_([parts[i] for i in lying], [views[i] for i in lying])
        if self._line(message).near:
            synchronize(self._device)  # the receiver reads as soon as the headers arrive
        return content

    def _settle(self, stretch: Stretch, version: int, deadline: Deadline) -> None:
        with spans.span("wait for engine rank", stretch.destination):
            acknowledgement = self._lines[stretch.destination].acknowledgement(stretch, deadline)
        if acknowledgement.status == NOT_EXPECTED:
            raise RuntimeError(
                f"trainer rank {self._rank} pushed version {version}, engine rank {stretch.destination} expected "
                f"{acknowledgement.version}; push and receive must name the same version"
            )
        if acknowledgement.status == CORRUPTED:
            message = next(m for m in stretch.messages if m.number == acknowledgement.number)
            raise RuntimeError(
                f"trainer rank {self._rank}: engine rank {message.destination} holds other bytes than were sent, in "
                f"message {message.number} of version {version}: {', '.join(c.source_name for c in message.copies[:3])}"
            )

    def close(self) -> None:
        self._broken = True
        for line in self._lines.values():
            line.close()
        self._lines = {}
        self._slots.close()
