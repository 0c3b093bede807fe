"""How the driver waits. Every wait has a deadline, and the first failure of a process ends the wait with its cause,
because the other processes may be inside a collective that will never complete.

Invariants (tests/unit/cluster, tests/e2e): a wait ends with results, or with an error that says which process the
driver waited for, for how long, what that process is doing and where its log is. The message is written for people;
the original traceback is attached as `__cause__`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megatron_rl import spans
from megatron_rl.cluster.process import NOT_THE_CAUSE, Process, inspect, last_error, root_cause

TICK_S = 0.2
"""The time between two calls of `on_tick`."""


def _nothing() -> None:
    pass


on_tick: Callable[[], None] = _nothing
"""Called during every wait; see `session.ray_session`."""


Result = TypeVar("Result")
Waitable = TypeVar("Waitable", ray.ObjectRef, ray.ObjectRefGenerator)

_threads: set[threading.Thread] = set()
_is_leaving = threading.Event()


class Leaving(BaseException):
    """Raised in a thread that must leave Ray. It is no `Exception`, so that `except Exception` does not catch it."""


def tick() -> None:
    """Call `on_tick` in the main thread: what it raises is meant for the loop.

    Raises:
        Leaving: in another thread, if it must leave Ray.
    """
    if threading.current_thread() is threading.main_thread():
        on_tick()
    elif _is_leaving.is_set():
        raise Leaving


def in_thread(work: Callable[[], Result], name: str) -> Future[Result]:
    """Run `work`, which may call Ray, in a thread of its own. Every wait inside it must call `tick`."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Leaving:
            future.cancel()
        except BaseException as error:
            future.set_exception(error)
        finally:
            _threads.discard(threading.current_thread())

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return future


def leave(timeout_s: float) -> None:
    """End the threads of `in_thread`. While Ray is shut down, a thread inside Ray would be a segmentation fault."""
    _is_leaving.set()
    for thread in list(_threads):
        thread.join(timeout_s)
    _is_leaving.clear()


class ProcessLost(RuntimeError):
    """A process has died or does not answer."""

    def __init__(self, message: str, *, silent: bool, stopped: bool = False) -> None:
        super().__init__(message)
        self.silent = silent
        """True: the process did not answer in time. False: it died."""
        self.stopped = stopped
        """True: it did not answer because something outside has stopped it (SIGSTOP)."""


def gather(
    references: Sequence[ray.ObjectRef], processes: Sequence[Process], doing: str, timeout_s: float
) -> list[Any]:
    """Wait for all results and return them in the order of `references`.

    Args:
        doing: what the processes were asked to do, as error messages name it, such as `to update`.

    Raises:
        ValueError: a process raised it; the message names the process.
        OSError: a process raised it; the message names the process.
        ProcessLost: a process died or did not answer in time.
        RuntimeError: a process raised any other error.
    """
    results: dict[ray.ObjectRef, Any] = {}
    waiting = list(references)
    start = time.monotonic()
    while waiting:
        with spans.span("wait", doing):
            done, waiting = _wait(waiting, 1, start + timeout_s - time.monotonic())
        if done and waiting:  # a look at all references for each result would be quadratic
            also_done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            done += also_done
        if not done:
            silent = [processes[references.index(reference)] for reference in waiting]
            raise _describe_silence(silent, processes, doing, timeout_s)
        for reference in done:
            try:
                results[reference] = ray.get(reference)
            except RayError as error:
                raise explain(error, processes[references.index(reference)]) from error
    return [results[reference] for reference in references]


def _wait(references: Sequence[Waitable], num_returns: int, timeout_s: float) -> tuple[list[Waitable], list[Waitable]]:
    """`ray.wait`, with a `tick` every TICK_S."""
    end = time.monotonic() + timeout_s
    while True:
        left = max(0.0, end - time.monotonic())
        done, waiting = ray.wait(list(references), num_returns=num_returns, timeout=min(left, TICK_S))
        if len(done) >= num_returns or left == 0:
            return done, waiting
        tick()


def pause(seconds: float) -> None:
    """Do nothing for so long, with a `tick` every TICK_S."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, TICK_S))
        tick()


def settle(references: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any | RayError]:
    """Wait for all calls, and return the result or the error of each, in order."""
    _wait(references, len(references), timeout_s)
    outcomes: list[Any | RayError] = []
    for reference in references:
        try:
            outcomes.append(ray.get(reference, timeout=0))
        except RayError as error:
            outcomes.append(error)
    return outcomes


def locate_all(processes: Sequence[Process], timeout_s: float, needs: str) -> None:
    """Wait until Ray has placed all processes, and store their locations.

    Args:
        needs: the resources that each process asks Ray for, as the error message names them.

    Raises:
        ProcessLost: a process was not placed in time.
    """
    references = [process.actor.locate.remote() for process in processes]
    _, waiting = _wait(references, len(references), timeout_s)
    if waiting:
        unplaced = processes[references.index(waiting[0])]
        free = ", ".join(
            f"{amount:g} {kind}" for kind, amount in ray.available_resources().items() if kind in ("CPU", "GPU")
        )
        raise ProcessLost(
            f"Ray has not started {len(waiting)} of {len(processes)} processes ({unplaced.name} first) in "
            f"{timeout_s:g} s: each needs {needs}; free in the whole cluster: {free or 'nothing'}. `ray status` shows "
            "what uses the rest",
            silent=True,
        )
    for process, location in zip(processes, gather(references, processes, "to start", timeout_s), strict=True):
        process.location = location


def explain(error: RayError, process: Process) -> Exception:
    """An exception with a message for people. A ValueError or OSError keeps its type and message, because our code
    writes these for people. Of any other error the message gives the cause in one line."""
    if isinstance(error, RayActorError):
        if process.location and all(node["NodeID"] != process.location.node for node in ray.nodes() if node["Alive"]):
            return ProcessLost(
                f"{process} is lost with its node, which Ray does not reach any more: the machine, its network or its "
                "Ray has failed",
                silent=False,
            )
        end = last_error(process.log) or root_cause(str(error)) or ""
        return ProcessLost(
            f"{process} died. Its log, {process.log}, ends:\n{_indented(end)}\n"
            "If these lines show no error, the process was killed from outside, for example because memory ran out",
            silent=False,
        )
    if isinstance(error, GetTimeoutError):
        return ProcessLost(f"{process} does not answer: {inspect(process)}; its log: {process.log}", silent=True)
    if isinstance(error, RayTaskError):
        cause = error.cause
        for kind in (ValueError, OSError):
            if isinstance(cause, kind):  # the base class is raised, because subclasses take other arguments
                return kind(f"{process.name}: {cause}")
        text = f"{type(cause).__name__}: {cause}"
        if NOT_THE_CAUSE.search(text):  # a process of vLLM below this one has written the cause to the log
            text = last_error(process.log)
        return RuntimeError(f"{process.name}: {text.strip()} (whole log: {process.log})")
    return RuntimeError(f"{process.name}: {error}")


def _describe_silence(silent: Sequence[Process], asked: Sequence[Process], doing: str, timeout_s: float) -> ProcessLost:
    """The error for processes that did not answer in time. It inspects each of them, and names those first that are
    stopped or gone, because the others probably wait for them."""
    found = [(process, inspect(process)) for process in silent[:8]]
    found.sort(key=lambda one: "stopped" not in one[1] and "gone" not in one[1])
    lines = [f"  {process}: {state}; log: {process.log}" for process, state in found]
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - timeout_s))
    names = ", ".join(process.name for process, _ in found)
    more = f" and {len(silent) - len(found)} more" if len(silent) > len(found) else ""
    answered = len({id(process) for process in asked}) - len(silent)
    others = f"; {answered} other processes have answered" if answered else ""
    return ProcessLost(
        f"the driver has waited for {names}{more} {doing} for {timeout_s:g} s, since {since}{others}:\n"
        + "\n".join(lines),
        silent=True,
        stopped=any("stopped" in state for _, state in found),
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
