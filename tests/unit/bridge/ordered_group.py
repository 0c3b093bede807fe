"""A stand-in for a NCCL communicator, over gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import NamedTuple

import torch
from patience import deadline
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Work

MEETING = 2**20
"""The tags from here on belong to first messages. Those of the others are below."""


class Posted:
    """What is waited for. As in NCCL, a wait has no deadline."""

    def __init__(self, done: Future) -> None:
        self._done = done

    def is_completed(self) -> bool:
        return self._done.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        self._done.result()


class First(NamedTuple):
    """The first message of a pair in one direction."""

    kind: str
    """Seen from here: send or recv."""
    peer: int
    content: Tensor


class OrderedGroup:
    """Like a NCCL communicator on one stream, it does what a rank has posted one after the other, and tags mean
    nothing: the first send meets the first receive. A send ends only when the peer is there to receive it. Ranks whose
    orders differ get other messages, which is an error if their sizes differ, or wait for each other for ever.

    As in NCCL, a pair is connected at its first message, and the call of a send or a receive does not return before the
    other end has called too. The calls between `_start_coalescing` and `_end_coalescing` wait together, in the latter.
    """

    def __init__(self, gloo: ProcessGroupGloo) -> None:
        self._gloo, self._stream = gloo, ThreadPoolExecutor(1)
        self._numbers: Counter[tuple[str, int]] = Counter()
        self._connected: set[tuple[str, int]] = set()
        self._together: list[First] | None = None

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Posted | None:
        def run(number: int) -> None:
            self._gloo.send([torch.tensor([tensors[0].nbytes])], rank, 3 * number).wait()
            met = torch.empty(1, dtype=torch.bool)
            self._gloo.recv([met], rank, 3 * number + 1).wait()
            if not met:
                raise RuntimeError("the peer receives something else")
            self._gloo.send(tensors, rank, 3 * number + 2).wait()

        return self._post(First("send", rank, tensors[0]), run)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Posted | None:
        def run(number: int) -> None:
            num_bytes = torch.empty(1, dtype=torch.int64)
            self._gloo.recv([num_bytes], rank, 3 * number).wait()
            met = num_bytes == tensors[0].nbytes
            self._gloo.send([met], rank, 3 * number + 1).wait()
            if not met:
                raise RuntimeError(f"the peer sends {num_bytes.item()} bytes, and {tensors[0].nbytes} are expected")
            self._gloo.recv(tensors, rank, 3 * number + 2).wait()

        return self._post(First("recv", rank, tensors[0]), run)

    def _start_coalescing(self) -> None:
        self._together = []

    def _end_coalescing(self) -> Posted | None:
        assert self._together is not None
        together, self._together = self._together, None
        self._connect(together)
        done: Future[None] = Future()
        done.set_result(None)
        return Posted(done) if together else None

    def abort(self) -> None:
        self._gloo.abort()
        self._stream.shutdown(wait=False, cancel_futures=True)

    def _post(self, message: First, run: Callable[[int], None]) -> Posted | None:
        if self._together is not None:
            self._together.append(message)
            return None
        pair = (message.kind, message.peer)
        if pair not in self._connected:
            self._connect([message._replace(content=torch.empty(1, dtype=torch.uint8))])
        number = self._numbers[pair]
        self._numbers[pair] += 1
        return Posted(self._stream.submit(run, number))

    def _connect(self, messages: Sequence[First]) -> None:
        """Exchange the messages, and wait here until every peer has called."""
        works: list[Work] = []
        for kind, peer, content in messages:
            self._connected.add((kind, peer))
            called = torch.empty(1)
            if kind == "send":
                works += [self._gloo.send([content], peer, MEETING), self._gloo.recv([called], peer, MEETING + 1)]
            else:
                works += [self._gloo.send([called], peer, MEETING + 1), self._gloo.recv([content], peer, MEETING)]
        for work in works:
            work.wait(timedelta(seconds=deadline(20)))
