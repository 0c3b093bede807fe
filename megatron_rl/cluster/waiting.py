"""How the driver waits: every wait has a deadline, and the first failure of any process ends it with its cause, because
the others may be inside a collective that will never complete.

Invariants (tests/unit/cluster, tests/e2e): a wait ends with results, or with who was waited for, how long, what that
process is doing and where its log is; messages are for people, a traceback stays attached as `__cause__`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megatron_rl.cluster.process import NOT_THE_CAUSE, Process, inspect, last_words

TICK_S = 0.2


def _nothing() -> None:
    pass


on_tick: Callable[[], None] = _nothing
"""See `session.ray_session`."""


class ProcessLost(RuntimeError):
    """A process has died or does not answer."""

    def __init__(self, message: str, *, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent
        """It has not answered in time; otherwise it has died."""


def gather(
    references: Sequence[ray.ObjectRef], processes: Sequence[Process], doing: str, timeout_s: float
) -> list[Any]:
    """The results in order.

    Args:
        doing: what the processes were asked to do, for the message: `to update`.

    Raises:
        ValueError, OSError: what a process raised, with its name.
        ProcessLost: a process died, or has not answered in time.
        RuntimeError: any other error of a process.
    """
    results: dict[ray.ObjectRef, Any] = {}
    waiting = list(references)
    start = time.monotonic()
    while waiting:
        done, waiting = _wait(waiting, 1, start + timeout_s - time.monotonic())
        if not done:
            silent = [processes[references.index(reference)] for reference in waiting]
            raise _silence(silent, processes, doing, timeout_s)
        for reference in done:
            try:
                results[reference] = ray.get(reference)
            except RayError as error:
                raise told(error, processes[references.index(reference)]) from error
    return [results[reference] for reference in references]


def _wait(
    references: Sequence[ray.ObjectRef], num_returns: int, timeout_s: float
) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
    """Ray's wait, cut into ticks."""
    end = time.monotonic() + timeout_s
    while True:
        left = max(0.0, end - time.monotonic())
        done, waiting = ray.wait(list(references), num_returns=num_returns, timeout=min(left, TICK_S))
        if len(done) >= num_returns or left == 0:
            return done, waiting
        on_tick()


def settle(references: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any | RayError]:
    """Wait for all, whatever becomes of them: results in order, or the errors in their places."""
    _wait(references, len(references), timeout_s)
    outcomes: list[Any | RayError] = []
    for reference in references:
        try:
            outcomes.append(ray.get(reference, timeout=0))
        except RayError as error:
            outcomes.append(error)
    return outcomes


def locate_all(processes: Sequence[Process], timeout_s: float, needs: str) -> None:
    """Wait until Ray has placed all of them, and note where.

    Args:
        needs: what each asks Ray for, for the message.

    Raises:
        ProcessLost: one has not been placed in time.
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
            f"{timeout_s:g} s: each needs {needs}; free in the whole cluster: {free or 'nothing'}. Look at "
            "`ray status`",
            silent=True,
        )
    for process, location in zip(processes, gather(references, processes, "to start", timeout_s), strict=True):
        process.location = location


def told(error: RayError, process: Process) -> Exception:
    """For people. ValueError and OSError were written for them; of anything else the cause is told in a line."""
    if isinstance(error, RayActorError):
        words = last_words(process.log)
        return ProcessLost(
            f"{process} died. Its log, {process.log}, ends:\n{_indented(words)}\n"
            "If that is no error, it was killed from outside, for example for want of memory",
            silent=False,
        )
    if isinstance(error, GetTimeoutError):
        return ProcessLost(f"{process} does not answer: {inspect(process)}; its log: {process.log}", silent=True)
    if isinstance(error, RayTaskError):
        cause = error.cause
        for kind in (ValueError, OSError):
            if isinstance(cause, kind):  # their subclasses take other arguments than a text
                return kind(f"{process.name}: {cause}")
        text = f"{type(cause).__name__}: {cause}"
        if NOT_THE_CAUSE.search(text):  # a vendor's process below this one knows why, and has written it down
            text = last_words(process.log)
        return RuntimeError(f"{process.name}: {text.strip()} (all of it: {process.log})")
    return RuntimeError(f"{process.name}: {error}")


def _silence(silent: Sequence[Process], asked: Sequence[Process], doing: str, timeout_s: float) -> ProcessLost:
    """Of all silent ranks the one that keeps the others waiting is likely the stopped one: each is looked at."""
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
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
