"""What a person sees of a run. It is only a view: a run whose reader goes away (`| head`, a `tee` that ends, a closed
terminal, a lost connection) or stops reading (Ctrl-S, a suspended `less`), or whose output was closed from the
beginning (`>&-`), trains on, into its files, and says so in `driver.log`."""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from stat import S_ISFIFO
from typing import Any, TextIO, cast

from rich.console import Console

from megatron_rl.processes import message_of

log = logging.getLogger("megatron_rl.driver")

PATIENCE_S = 2.0
"""How long a run waits for a terminal or a pipe that is not read."""
RENEWED_S = 60.0
"""How long a reader must have taken everything before it is waited for again."""


def open_closed() -> list[str]:
    """Open /dev/null in the place of the standard streams that were closed when Python began. Otherwise a file of the
    run would get their numbers, and what processes of the run print would be written into it. Returns their names."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:  # in the order of their numbers: a file gets the first free one
        stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115  it lives as long as the process
        os.set_inheritable(stream.fileno(), True)
        setattr(sys, name, stream)
    return closed


class Output:
    """Standard output, until nobody reads it any more; then nothing. After `never_wait` also a reader that stays and
    does not read, as after Ctrl-S, is waited for only shortly, and then gets what it takes at once."""

    def __init__(self) -> None:
        self._fixed: TextIO | None = None
        self._direct: int | None = None
        """A descriptor of the same terminal or pipe whose writes never wait."""
        self._dropped_at = -inf
        """When something was left out for the last time, in seconds of time.monotonic()."""

    @property
    def _stream(self) -> TextIO:
        # While rich's live view runs, it has its own file in the place of sys.stdout, which would print to this one.
        return self._fixed or cast(TextIO, getattr(sys.stdout, "rich_proxied_file", sys.stdout))

    def never_wait(self, stream: TextIO) -> bool:
        """Write to this stream from now on; returns whether it is one that can make its writer wait for ever."""
        try:
            number = stream.fileno()
            if os.isatty(number) or S_ISFIFO(os.fstat(number).st_mode):
                stream.flush()
                # What does not wait is not the descriptor but what was opened, which other programs share.
                self._direct = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                self._fixed = stream
        except OSError as error:
            log.warning("the output may make the run wait, because it cannot be opened again: %s", error)
        return self._direct is not None

    def write(self, text: str) -> int:
        stream = self._stream
        encoding = stream.encoding or "utf-8"
        shown = text.encode(encoding, errors="backslashreplace")  # also what a terminal cannot show
        try:
            if self._direct is None:
                return stream.write(shown.decode(encoding))
            self._offer(self._direct, shown)
        except OSError as error:  # EPIPE of a pipe, EIO of a terminal that has hung up
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        try:
            if self._direct is None:
                self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _offer(self, descriptor: int, data: bytes) -> None:
        start = time.monotonic()
        is_stuck = start - self._dropped_at < RENEWED_S
        deadline = start if is_stuck else start + PATIENCE_S
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                rest_s = deadline - time.monotonic()
                if rest_s <= 0 or not poll.poll(1000 * rest_s):
                    break
        if data:
            self._dropped_at = time.monotonic()
            if not is_stuck:
                log.warning("nobody reads the output: the run goes on, and what its reader does not take is left out")

    def _lose(self, error: OSError) -> None:
        """Send all later output to /dev/null: the output of this class, what other code prints, and what Python itself
        writes when it ends."""
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (self._stream.fileno(), self._direct):
            if descriptor is not None:
                os.dup2(null, descriptor)
        os.close(null)
        log.warning("the output cannot be written any more (%s): the run goes on without it", error)


OUTPUT = Output()


def never_wait() -> None:
    """Let no reader of this process's output make it wait for longer than PATIENCE_S."""
    if OUTPUT.never_wait(sys.stdout):
        sys.stdout = OUTPUT
    errors = Output()
    if errors.never_wait(sys.stderr):
        sys.stderr = errors


@contextmanager
def waiting(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Say what a start waits for: in a terminal in one line that changes, elsewhere in a line each, with the seconds
    since the beginning. The value of the context is a function that says the next thing."""
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
        return
    start = time.monotonic()

    def tell(what: str) -> None:
        console.print(f"{time.monotonic() - start:5.1f} s  {what}", markup=False, soft_wrap=True)

    tell(what)
    yield tell
    tell("started")


def screen() -> Console:
    return Console(highlight=False, file=OUTPUT)  # type: ignore[arg-type]  # it has what a console asks a file for


CLOSED = open_closed()
console = screen()


def tell_error(error: Exception) -> int:
    """Print what went wrong, with the notes of the error; returns the exit status."""
    console.print("[bold red]error:[/]", end=" ")
    console.print("\n".join([message_of(error), *getattr(error, "__notes__", [])]), markup=False, soft_wrap=True)
    return 1
