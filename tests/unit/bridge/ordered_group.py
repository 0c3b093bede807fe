"""A stand-in for a NCCL communicator, over gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo


class Posted:
    """What is waited for."""

    def __init__(self, done: Future) -> None:
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> None:
        try:
            self._done.result(timeout and timeout.total_seconds())
        except NotDone:
            raise RuntimeError("not done within the deadline") from None


class OrderedGroup:
    """Like a NCCL communicator on one stream, it does what a rank has posted one after the other, and tags mean
    nothing: the first send meets the first receive. A send ends only when the peer is there to receive it. Ranks whose
    orders differ get other messages, which is an error if their sizes differ, or wait for each other for ever.
    """

    def __init__(self, gloo: ProcessGroupGloo) -> None:
        self._gloo, self._stream = gloo, ThreadPoolExecutor(1)
        self._numbers: Counter[tuple[str, int]] = Counter()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Posted:
        def run(number: int) -> None:
            self._gloo.send([torch.tensor([tensors[0].nbytes])], rank, 3 * number).wait()
            met = torch.empty(1, dtype=torch.bool)
            self._gloo.recv([met], rank, 3 * number + 1).wait()
            if not met:
                raise RuntimeError("the peer receives something else")
            self._gloo.send(tensors, rank, 3 * number + 2).wait()

        return self._post("send", rank, run)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Posted:
        def run(number: int) -> None:
            num_bytes = torch.empty(1, dtype=torch.int64)
            self._gloo.recv([num_bytes], rank, 3 * number).wait()
            met = num_bytes == tensors[0].nbytes
            self._gloo.send([met], rank, 3 * number + 1).wait()
            if not met:
                raise RuntimeError(f"the peer sends {num_bytes.item()} bytes, and {tensors[0].nbytes} are expected")
            self._gloo.recv(tensors, rank, 3 * number + 2).wait()

        return self._post("recv", rank, run)

    def abort(self) -> None:
        self._gloo.abort()
        self._stream.shutdown(wait=False, cancel_futures=True)

    def _post(self, kind: str, rank: int, run: Callable[[int], None]) -> Posted:
        number = self._numbers[kind, rank]
        self._numbers[kind, rank] += 1
        return Posted(self._stream.submit(run, number))
