"""Gloo between trainer ranks and engine workers, in a group of its own: nobody's default group is touched.

Every message begins with its version and its bucket's number, and every receiver answers when all is written,
so a push that returns means engines that hold the weights. Invariants (tests/unit/bridge): ranks that
disagree about the plan refuse to join, all of them; a peer that dies, stalls or speaks of another version
raises on both sides within the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import DistStoreError, PrefixStore, ProcessGroupGloo, TCPStore

from megatron_rl.bridge.setup import BUCKET_BYTES, BridgeSetup, split_buckets
from megatron_rl.layout import Copy, volume

HEADER_BYTES = 16
"""Two int64 before the payload: version, bucket."""
ANSWER = 0
"""Tag of the receiver's answer to a whole push; bucket b has tag b + 1."""


def host_store(host: str, timeout_s: float = 300.0) -> TCPStore:
    """Serve the rendezvous on a free port (`.port`); keep the value alive as long as the bridge."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


class GlooTransport:
    """One rank's end. Peers are ranks of the joint group; a route is a peer and the copies in wire order."""

    def __init__(self, setup: BridgeSetup, rank: int, routes: dict[int, Sequence[Copy]]) -> None:
        """Join; returns when every rank has.

        Raises:
            ValueError: the ranks do not agree on what is transferred.
        """
        self.rank, self.dtype = rank, getattr(torch, setup.dtype)
        self.deadline = timedelta(seconds=setup.timeout_s)
        max_elements = BUCKET_BYTES // self.dtype.itemsize
        self.buckets = {peer: split_buckets(copies, max_elements) for peer, copies in routes.items()}
        self.num_buckets = max((len(b) for b in self.buckets.values()), default=0)
        self._buffers = {
            peer: torch.empty(HEADER_BYTES + max(map(self._num_bytes, buckets)), dtype=torch.uint8)
            for peer, buckets in self.buckets.items()
        }
        self._store = TCPStore(setup.host, setup.port, is_master=False, timeout=self.deadline)
        store = PrefixStore("megatron_rl/bridge", self._store)
        self._agree(store, setup)
        self._group = ProcessGroupGloo(PrefixStore("gloo", store), rank, setup.world_size, self.deadline)

    def _agree(self, store: PrefixStore, setup: BridgeSetup) -> None:
        keys = [f"agreement/{rank}" for rank in range(setup.world_size)]
        store.set(keys[self.rank], setup.agreement)
        try:
            said = [text.decode() for text in store.multi_get(keys)]
        except DistStoreError as error:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(
                f"ranks {absent} of {setup.world_size} did not join the bridge within {setup.timeout_s:g} s "
                f"(trainers come first, from rank {setup.mesh.world_size} on they are engine workers)"
            ) from error
        others = {text: rank for rank, text in enumerate(said) if text != setup.agreement}
        if others:
            raise ValueError(
                f"the bridge's ranks do not agree: rank {self.rank} says {setup.agreement!r}, "
                + ", ".join(f"rank {rank} says {text!r}" for text, rank in others.items())
                + "; give trainer and engines the same model, meshes and dtype"
            )

    def _num_bytes(self, copies: Sequence[Copy]) -> int:
        return self.dtype.itemsize * sum(volume(copy.source_box) for copy in copies)

    @property
    def num_bytes(self) -> int:
        """Payload of one push over all this rank's routes."""
        return sum(self._num_bytes(copies) for buckets in self.buckets.values() for copies in buckets)

    def peers(self, bucket: int) -> list[int]:
        """Who takes part in a round."""
        return [peer for peer, buckets in self.buckets.items() if bucket < len(buckets)]

    def message(self, peer: int, bucket: int) -> torch.Tensor:
        return self._buffers[peer][: HEADER_BYTES + self._num_bytes(self.buckets[peer][bucket])]

    def header(self, peer: int) -> torch.Tensor:
        return self._buffers[peer][:HEADER_BYTES].view(torch.int64)

    def payload(self, peer: int, bucket: int) -> list[torch.Tensor]:
        """One view of the message a copy, shaped like the copy's rectangle."""
        flat = self.message(peer, bucket)[HEADER_BYTES:].view(self.dtype)
        copies = self.buckets[peer][bucket]
        parts = flat.split([volume(copy.source_box) for copy in copies])
        return [
            part.view([stop - start for start, stop in copy.source_box])
            for part, copy in zip(parts, copies, strict=True)
        ]

    def send(self, peer: int, bucket: int):
        return self._group.send([self.message(peer, bucket)], peer, bucket + 1)

    def receive(self, peer: int, bucket: int):
        return self._group.recv([self.message(peer, bucket)], peer, bucket + 1)

    def acknowledge(self, version: int) -> None:
        """Tell every sender which version is in place, or was expected."""
        answer = torch.tensor([version], dtype=torch.int64)
        for work in [self._group.send([answer], peer, ANSWER) for peer in self.buckets]:
            work.wait(self.deadline)

    def await_acknowledgements(self, version: int) -> None:
        """Wait until every receiver has all of it.

        Raises:
            RuntimeError: a receiver died, was silent past the deadline, or expected another version.
        """
        answers = {peer: torch.empty(1, dtype=torch.int64) for peer in self.buckets}
        works = [self._group.recv([answer], peer, ANSWER) for peer, answer in answers.items()]
        for work in works:
            work.wait(self.deadline)
        for peer, answer in answers.items():
            if answer.item() != version:
                raise RuntimeError(
                    f"trainer rank {self.rank} pushed version {version}, rank {peer} expected "
                    f"{answer.item()}; push and receive must name the same version"
                )

    def close(self) -> None:
        self._group.shutdown()
