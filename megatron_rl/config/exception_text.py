"""What a function of the user's own has raised, as text. It may be any object of a class of theirs, whose attributes
and methods are theirs, too.

Invariant (tests/unit/verifiers): the texts can be written to any file, and finding them raises nothing.
"""

from __future__ import annotations

import traceback
from types import TracebackType


def said(error: BaseException) -> str:
    """The type and the message, as in the last line of a traceback; of a group also what its first error said."""
    try:
        lines = traceback.format_exception_only(error)  # survives a __str__ that raises
    except (AttributeError, TypeError):  # its class has other things under the names that Python reads
        return type(error).__name__
    # Notes come after the message, and the lines of a syntax error, which are indented, before it.
    own = printable(next((line for line in lines if not line.startswith("  ")), lines[-1]).strip())
    return f"{own}: {said(error.exceptions[0])}" if isinstance(error, BaseExceptionGroup) else own


def place(error: BaseException, file: str | None = None) -> str:
    """` (file:line)`: where it was raised; empty if Python does not know.

    Args:
        file: the last line in this file, where somebody can change it, is preferred to the last line of all.
    """
    frames = traceback.extract_tb(_trace(error))
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
        frames += traceback.extract_tb(_trace(error))
    where = ([frame for frame in frames if frame.filename == file] or frames)[-1:]
    return "".join(printable(f" ({frame.filename}:{frame.lineno})") for frame in where)


def traced(error: BaseException) -> str:
    """The whole traceback, for a log."""
    try:
        text = "".join(traceback.format_exception(error))
    except (AttributeError, TypeError):  # as in `said`
        text = "".join(traceback.format_tb(_trace(error))) + said(error)
    return printable(text.rstrip())


def _trace(error: BaseException) -> TracebackType | None:
    """Python's own, also if the class has something else under its name."""
    own: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    return own


def printable(text: str) -> str:
    """The text with halves of surrogate pairs escaped: no file, terminal or message of Ray's can hold them."""
    return text.encode(errors="backslashreplace").decode()
