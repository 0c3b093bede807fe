"""Judges answers in worker processes, and ends a worker whose answer takes too long.

Python cannot interrupt a loop inside a C extension, and a crash ends the whole process. So each answer is judged in a
process that can be killed without harm to the other answers.

Three kinds of processes take part. The process that has the `Pool` starts a fork server, which loads the judge once;
the fork server forks the workers, so a new worker is ready within milliseconds and has nothing to import. A worker
judges one item at a time. While many items wait, a few small ones lie in its line already, so that it need not wait for
the parent after each. It answers in the order of the requests: if it is killed, the first item without an answer
is the one that it judged, and the others are given to another worker.

The fork server is our own and not the one of `multiprocessing`, because that one imports the parent's `__main__` in
each new worker (inside a Ray actor this is Ray's own program), exists once in a process, and remains when a pool is
closed. Ours is a new Python interpreter, so the threads and locks of the parent are not copied.

Invariants: each item has exactly one verdict, in the order of the items; an item that has no verdict within its time,
whose worker dies, or whose judge raises, has a failed verdict and never a score, unless the caller says that only an
item itself can need so much computing (`too_much`); all other items have their own verdicts; after `close`, and after
any end of the parent process, no process of the pool is left, and no process that the judge has started.
"""

from __future__ import annotations

import os
import pickle
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron_rl.processes import signal_name
from megatron_rl.types import Verdict
from megatron_rl.verifiers import fork_server
from megatron_rl.verifiers.fork_server import MAX_FAULT_BYTES, NUMBER

T = TypeVar("T")

MOST_AHEAD, SPREAD = 8, 8
"""At most MOST_AHEAD items lie in a worker's line behind the one that it judges, and none while fewer than SPREAD for
each worker wait: at the end of a call no item waits behind another one while a worker has nothing to do."""
PATIENCE = 10
"""How many times as long as its time an item may take while its worker has computed for less, on a busy machine."""
AHEAD_BYTES = 64 << 10
"""The largest size of the items in a line. It is below what a socket holds, so that the parent never waits for a worker
that judges."""


class Pool(Generic[T]):
    """Judges answers in processes of its own.

    If the fork server itself dies, the items that are being judged fail, and a new one is started.

    Args:
        judge: gives the verdict on one item. It is pickled once, so it must be defined in a module that can be
            imported (not in the script that runs as `__main__`). It is unpickled once, in the fork server: workers
            inherit what it then prepares, such as caches. It runs in the main thread of a worker, and there OpenMP has
            one thread.
        num_workers: how many items are judged at the same time. Workers are started when there are items for them.
        timeout_s: how long one item may take. The time begins when a worker is given it, or has answered the one
            before.
        too_much: the verdict on an item whose worker has computed for this time, if that is the item's fault; None if
            it may be something else's. On a busy machine such an item gets up to PATIENCE times as long.

    Raises:
        ValueError: the judge cannot be pickled, or cannot be loaded in another process.
    """

    def __init__(
        self, judge: Callable[[T], Verdict], num_workers: int, timeout_s: float, too_much: Verdict | None = None
    ) -> None:
        if num_workers < 1 or timeout_s <= 0:
            raise ValueError(
                f"a pool needs at least one worker and a time above 0 s, not {num_workers} and {timeout_s:g}"
            )
        try:
            self._pickled_judge = pickle.dumps(judge)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(f"the judge must be a function of a module or a picklable object: {error}") from error
        self._num_workers, self._timeout_s, self._too_much = num_workers, timeout_s, too_much
        self._lock = threading.Lock()
        self._server = _ForkServer(self._pickled_judge)
        self._lines = selectors.DefaultSelector()
        """The lines of all workers."""
        self._idle: list[_Worker] = []
        self._busy: dict[_Worker, _Turn] = {}
        """Worker -> when the item that it judges must be done."""
        self._waiting: deque[_Item] = deque()

    def judge(self, items: Sequence[T]) -> list[Verdict]:
        """The verdict on each item, in the order of the items. Calls from several threads run one after another.

        Raises:
            OSError: no process can be started.
        """
        with self._lock:
            verdicts: list[Verdict | None] = [None] * len(items)
            for key, _ in self._lines.select(0):  # an idle worker says nothing, so these have ended
                self._idle.remove(key.data)
                self._end(key.data)
            self._waiting.extend(map(_Item, range(len(items)), items))
            try:
                while self._waiting or self._busy:
                    self._hand_out()
                    for index, verdict in self._next_verdicts():
                        verdicts[index] = verdict
            except BaseException:
                # Nobody waits for the verdicts any more, and an interruption may have left a request unanswered. The
                # next call starts a new fork server.
                self._end_all()
                raise
            assert all(verdict is not None for verdict in verdicts)
            return [verdict for verdict in verdicts if verdict is not None]

    def close(self) -> None:
        """End all processes and free what they used. The pool cannot be used afterwards; a second call does nothing."""
        with self._lock:
            self._end_all()
            self._lines.close()

    def _end_all(self) -> None:
        for key in list((self._lines.get_map() or {}).values()):
            self._lines.unregister(key.fileobj)
            key.data.line.close()
        self._idle.clear()
        self._busy.clear()
        self._waiting.clear()
        self._server.close()

    def _start(self) -> _Worker:
        try:
            worker = self._server.start_worker()
        except _ServerEnded:
            self._server.close()
            self._server = _ForkServer(self._pickled_judge)
            worker = self._server.start_worker()
        self._lines.register(worker.line, selectors.EVENT_READ, worker)
        return worker

    def _hand_out(self) -> None:
        """Give each worker an item to judge, and then, while many wait, small ones for later."""
        while self._waiting and (self._idle or len(self._busy) < self._num_workers):
            worker = self._idle.pop() if self._idle else self._start()
            self._busy[worker] = self._turn(worker)
            self._give(worker)
        for worker in self._busy:
            while (
                len(worker.items) <= min(MOST_AHEAD, len(self._waiting) // (SPREAD * self._num_workers))
                and sum(len(item.data) for item in worker.items) + len(self._waiting[0].data) <= AHEAD_BYTES
            ):
                self._give(worker)

    def _give(self, worker: _Worker) -> None:
        worker.items.append(self._waiting.popleft())
        # A worker that has just died is noticed when its line is read.
        with suppress(OSError):
            worker.line.send_bytes(worker.items[-1].data)

    def _next_verdicts(self) -> list[tuple[int, Verdict]]:
        """Wait until a worker has judged its item, has died or is out of time. Returns index and verdict of each."""
        earliest = min(turn.deadline for turn in self._busy.values())
        found = []
        for key, _ in self._lines.select(max(0.0, earliest - time.monotonic())):
            worker: _Worker = key.data
            if worker not in self._busy:  # it has died without an item
                self._idle.remove(worker)
                self._end(worker)
                continue
            try:
                while worker.items and worker.line.poll():
                    verdict = pickle.loads(worker.line.recv_bytes())
                    found.append((worker.items.popleft().index, verdict))
            except (EOFError, OSError):
                judged = worker.items.popleft()
                reason = f"the process that judged the answer ended: {self._end(worker)}"
                found.append((judged.index, Verdict(None, reason, failed=True)))
                continue
            del self._busy[worker]
            if worker.items:
                self._busy[worker] = self._turn(worker)
            else:
                self._idle.append(worker)
        now = time.monotonic()
        for worker, turn in list(self._busy.items()):
            if turn.deadline > now:
                continue
            verdict = Verdict(None, f"no verdict within {self._timeout_s:g} s", failed=True)
            if self._too_much is not None:
                missing_s = self._timeout_s - (_computed_s(worker.pid) - turn.computed_s)
                if missing_s > 0 and now < turn.begun + PATIENCE * self._timeout_s:
                    self._busy[worker] = replace(turn, deadline=now + missing_s)
                    continue
                verdict = self._too_much if missing_s <= 0 else verdict
            judged = worker.items.popleft()
            self._end(worker)
            found.append((judged.index, verdict))
        return found

    def _turn(self, worker: _Worker) -> _Turn:
        now = time.monotonic()
        return _Turn(now, now + self._timeout_s, _computed_s(worker.pid) if self._too_much else 0.0)

    def _end(self, worker: _Worker) -> str:
        """Kill a worker and all that its judge has started. The items in its line wait again. Returns how the worker
        ended."""
        self._busy.pop(worker, None)
        self._waiting.extendleft(reversed(worker.items))
        self._lines.unregister(worker.line)
        worker.line.close()
        return worker.server.end_worker(worker.pid)


def _computed_s(pid: int) -> float:
    """The seconds that a process has used a CPU, without its children; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


class _ServerEnded(RuntimeError):
    """The fork server has ended."""


@dataclass(frozen=True, eq=False)
class _Item:
    index: int
    item: Any

    @cached_property
    def data(self) -> bytes:
        """The pickled item. It is made when it is needed, because there may be thousands of long ones."""
        return pickle.dumps(self.item)


@dataclass(frozen=True, slots=True)
class _Turn:
    begun: float
    deadline: float
    """When the worker must have judged its item. Both are in seconds of `time.monotonic`."""
    computed_s: float
    """What it had computed when it got the item."""


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    pid: int
    line: Connection[Any, Any]
    """Carries pickled items to the worker and its pickled verdicts back."""
    server: _ForkServer
    items: deque[_Item] = field(default_factory=deque)
    """What it was given and has not answered; it judges the first one."""


SERVE = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from {module} import serve; serve({number})"


class _ForkServer:
    """The parent's side of the fork server.

    Raises:
        ValueError: the judge cannot be loaded.
    """

    def __init__(self, pickled_judge: bytes) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", SERVE.format(module=fork_server.__name__, number=theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # if it has ended, the next line says so
            stdin.write(pickle.dumps(sys.path) + pickled_judge)
        fault = self._control.recv(MAX_FAULT_BYTES)
        if fault != b"ready":
            self.close()
            said = fault.decode() or f"the process ended: {_how(self._process.returncode)}"
            raise ValueError(f"the judge must be importable in another process, but it cannot be loaded there: {said}")

    def start_worker(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._ask(0, theirs)
            except BaseException:
                ours.close()
                raise
        if pid < 0:
            ours.close()
            raise OSError(-pid, f"no worker process can be started: {os.strerror(-pid)}")
        return _Worker(pid, Connection(ours.detach()), self)

    def end_worker(self, pid: int) -> str:
        try:
            return _how(self._ask(pid))
        except _ServerEnded:
            return "the fork server had ended, and its workers with it"

    def close(self) -> None:
        self._control.close()
        self._process.wait()

    def _ask(self, number: int, *lines: socket.socket) -> int:
        try:
            socket.send_fds(self._control, [NUMBER.pack(number)], [line.fileno() for line in lines])
            answer = self._control.recv(NUMBER.size)
        except OSError as error:
            raise _ServerEnded from error
        if not answer:
            raise _ServerEnded
        return int(NUMBER.unpack(answer)[0])


def _how(code: int) -> str:
    return f"exit status {code}" if code >= 0 else signal_name(-code)
