"""The interface by which a loop learns that it was asked to stop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Stopping(Protocol):
    def __call__(self) -> bool:
        """Whether the run was asked to stop."""
        ...

    def promptly(self) -> AbstractContextManager[object]:
        """Inside this context a request to stop raises `StopRequested` at once. It is for work that may take minutes
        and changes no state of a checkpoint. Outside it, the loop stops when the step is done."""
        ...


class _Never:
    def __call__(self) -> bool:
        return False

    def promptly(self) -> AbstractContextManager[object]:
        return nullcontext()


NEVER: Stopping = _Never()
"""For a loop that is never asked to stop."""
