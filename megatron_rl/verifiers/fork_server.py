"""The process that forks the workers of a `Pool`, and what a worker does. `pool.py` has the parent's side."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_rl.config.exception_text import place, said
from megatron_rl.processes import STACKS
from megatron_rl.types import Verdict

NUMBER = struct.Struct("q")
"""A request to the fork server: 0 (with a line) to start a worker, or the id of a worker to end. The answer: the id of
the started worker, or how the ended one ended as `os.waitstatus_to_exitcode` gives it, or minus an errno."""
MAX_FAULT_BYTES = 10_000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def serve(control_number: int) -> None:
    """Load the judge from the standard input, and start and end workers until the parent closes its socket or ends.

    Args:
        control_number: the number of the socket for requests.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    faulthandler.register(STACKS, all_threads=True, chain=False)
    # What a killed worker leaves becomes a child of this process, which kills it.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    with socket.socket(fileno=control_number) as control:
        try:
            judge = pickle.load(sys.stdin.buffer)
        except Exception as error:  # an import may raise anything; the parent raises it
            control.send(said(error).encode()[:MAX_FAULT_BYTES])
            return
        workers: set[int] = set()
        with suppress(BrokenPipeError, ConnectionResetError):  # the parent has ended
            control.send(b"ready")
            while True:
                # multiprocessing has no message of a fixed size with a file descriptor; the socket module has.
                request, lines, *_ = socket.recv_fds(control, NUMBER.size, 1, socket.MSG_CMSG_CLOEXEC)
                if not request:
                    break
                if lines:
                    answer = _start(judge, control, lines[0])
                    workers |= {answer} if answer > 0 else set()
                else:
                    answer = _end(NUMBER.unpack(request)[0], workers)
                control.send(NUMBER.pack(answer))
        for pid in list(workers):
            _end(pid, workers)
    os._exit(0)  # the interpreter would free all modules first, and the parent waits


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")


def _start(judge: Callable[[Any], Verdict], control: socket.socket, line: int) -> int:
    """Fork a worker. Returns its id in the fork server; in the worker it does not return."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(line)
        return -(error.errno or 1)
    if pid:
        # The worker does the same. Whoever is first, its group exists before it can be killed.
        os.setpgid(pid, pid)
        os.close(line)
        return pid
    status = 1
    try:
        control.close()
        os.setpgid(0, 0)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            _work(judge, Connection(line))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _end(pid: int, workers: set[int]) -> int:
    """Kill a worker, its process group, and all that it leaves. Returns how it ended."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    workers.remove(pid)
    # A program that the judge has put into a session of its own is not in the group. It is our child now, and the
    # children that it leaves will be.
    while orphans := _children() - workers:
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)
    return os.waitstatus_to_exitcode(status)


def _children() -> set[int]:
    """The ids of this process's children."""
    pid = os.getpid()
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _work(judge: Callable[[Any], Verdict], line: Connection[Any, Any]) -> None:
    """Judge items until the parent closes the line or ends."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            line.send_bytes(_judged(judge, line.recv_bytes()))


def _judged(judge: Callable[[Any], Verdict], data: bytes) -> bytes:
    try:
        verdict = judge(pickle.loads(data))
        if not isinstance(verdict, Verdict):
            raise TypeError(f"the judge must return a Verdict, but it returned {type(verdict).__name__}")
        return pickle.dumps(verdict)
    except BaseException as error:  # an exception of a judge, SystemExit too, is never a score
        return pickle.dumps(Verdict(None, f"the judge raised {said(error)}{place(error)}", failed=True))
