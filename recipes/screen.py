"""What a person sees of a run. It is only a view: a run whose reader goes away (`| head`, a `tee` that ends, a closed
terminal, a lost connection), or whose output was closed from the beginning (`>&-`), trains on, into its files,
and says so in `driver.log`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

log = logging.getLogger("megatron_rl.driver")


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
    """Standard output, until nobody reads it any more; then nothing."""

    def write(self, text: str) -> int:
        encoding = sys.stdout.encoding or "utf-8"
        shown = text.encode(encoding, errors="backslashreplace").decode(encoding)  # what a terminal cannot show
        try:
            return sys.stdout.write(shown)
        except OSError as error:  # EPIPE of a pipe, EIO of a terminal that has hung up
            return self._lose(error)

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def _lose(self, error: OSError) -> int:
        """Send all later output to /dev/null: the output of this class, what other code prints, and what Python itself
        writes when it ends."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        log.warning("the output cannot be written any more (%s): the run goes on without it", error)
        return 0


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
    return Console(highlight=False, file=Output())  # type: ignore[arg-type]  # it has what a console asks a file for
