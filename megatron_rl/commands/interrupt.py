"""The signals that a run gets: requests to stop, and a terminal that hangs up."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from megatron_rl.commands.screen import console
from megatron_rl.ports import StopRequested

log = logging.getLogger("megatron_rl.driver")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupt:
    """Requests to stop, as an implementation of `loop.stopping.Stopping`.

    Until `check` is called, the signal handler raises. From then on it only records the request, because it might
    interrupt Ray, or the import of a library, anywhere. Code that waits calls `check` several times a second, and
    `check` raises: before training at the first request, and in training only inside `promptly`. Elsewhere the loop
    stops after the step. A second Ctrl-C stops at once. A second SIGTERM has no effect, because a cluster may send
    several.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal of the first request; None if there was none."""
        self._phase: Literal["starting", "training", "ending"] = "starting"
        self._abandoned = self._prompt = self._raised = False
        self._is_checked = False
        """Whether `check` was called: from then on the signal handler must not raise."""
        self.on_loss: Callable[[str], None] | None = None
        """What is called, in another thread, before the process ends because Ray was lost."""

    def __call__(self) -> bool:
        return self.signal is not None

    def ask(self, number: int, frame: object) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            name = "Ctrl-C" if number == signal.SIGINT else self.signal.name
            now = "stopping now" if self._prompt else "stopping after this step"
            said = {
                "starting": "stopping",
                "training": f"{now}, with a checkpoint; press Ctrl-C again to stop without one",
                "ending": "the run is done and writes its last files; press Ctrl-C again to stop without them",
            }
            console.print(f"\n[yellow]{name}: {said[self._phase]}.[/]")
            if not self._is_checked:
                raise StopRequested
        elif number == signal.SIGINT:
            self._abandoned = True

    def check(self) -> None:
        """
        Raises:
            StopRequested: the run must stop now. It is raised once.
            KeyboardInterrupt: Ctrl-C was pressed again. It is raised once.
        """
        self._is_checked = True
        if self._abandoned:
            self._abandoned = False
            raise KeyboardInterrupt
        if self.signal is not None and not self._raised and (self._prompt or self._phase == "starting"):
            self._raised = True
            raise StopRequested

    @contextmanager
    def training(self) -> Iterator[None]:
        """The context of the training loop, which saves its state when it is asked to stop."""
        self.check()
        self._phase = "training"
        try:
            yield
        finally:
            self._phase = "ending"

    @contextmanager
    def promptly(self) -> Iterator[None]:
        self._prompt = True
        try:
            self.check()
            yield
        finally:
            self._prompt = False

    @contextmanager
    def listening(self) -> Iterator[Interrupt]:
        before = {number: signal.signal(number, self.ask) for number in SIGNALS}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _tell_hang_up)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _tell_hang_up(number: int, frame: object) -> None:
    message = "the terminal has hung up (SIGHUP): the run goes on without it"
    if log.hasHandlers():
        log.warning(message)
    else:
        early.append(message)


early: list[str] = []
"""The messages for driver.log, until it is open."""


def _ignore_hang_up() -> None:
    if signal.getsignal(signal.SIGHUP) == _tell_hang_up:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


os.register_at_fork(after_in_child=_ignore_hang_up)  # another program keeps what is ignored: Ray's, and theirs
