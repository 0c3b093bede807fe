"""How a loop learns that somebody wants it to stop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Stopping(Protocol):
    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        ...

    def promptly(self) -> AbstractContextManager[object]:
        """Inside, a request to stop raises `StopRequested` at once: what runs there changes no state that a checkpoint
        holds, and may take minutes. Outside, a request waits until the step is done."""
        ...


class _Never:
    def __call__(self) -> bool:
        return False

    def promptly(self) -> AbstractContextManager[object]:
        return nullcontext()


NEVER: Stopping = _Never()
"""For a loop that nobody can interrupt."""
