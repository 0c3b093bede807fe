"""The messages between a program and its tests. Only the standard library is used, as in confined.py.

Invariants: a message is a line of JSON, so nothing in it can run; `decode` makes only values of builtin types, of
namedtuples, and of the types in STANDARD, so their operators are Python's own.
"""

from __future__ import annotations

import builtins
import json
import os

TYPE_CHECKING = False  # the module typing needs 5 ms for its import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

STANDARD = {
    "deque": "collections",
    "Counter": "collections",
    "OrderedDict": "collections",
    "defaultdict": "collections",
    "Decimal": "decimal",
    "Fraction": "fractions",
    "date": "datetime",
    "datetime": "datetime",
    "time": "datetime",
    "timedelta": "datetime",
    "timezone": "datetime",
    "UUID": "uuid",
    "PurePosixPath": "pathlib",
    "PosixPath": "pathlib",
}
"""Types of the standard library that travel, and their modules, which are imported where they are needed."""
MAX_MESSAGE_BYTES = 64 << 20
MAX_REASON_CHARACTERS = 300


class Line:
    """One message a line, as JSON."""

    def __init__(self, receive: int, send: int) -> None:
        self._in, self._out = os.fdopen(receive, "rb"), os.fdopen(send, "wb")

    def send(self, *message: Any) -> None:
        self._out.write(json.dumps(message).encode() + b"\n")
        self._out.flush()

    def receive(self) -> list[Any]:
        """Raises EOFError if the other side has ended, and ValueError if it sent no message."""
        line = self._in.readline(MAX_MESSAGE_BYTES)
        if not line:
            raise EOFError("the other side has ended")
        if not line.endswith(b"\n"):
            raise ValueError(f"a message is longer than {MAX_MESSAGE_BYTES} bytes, or was cut")
        message = json.loads(line)
        if not isinstance(message, list) or not message:
            raise ValueError("a message is not a list")
        return message


def encode(value: Any, refer: Callable[[Any], list[Any]]) -> Any:
    """A value as JSON. Subclasses of the builtin types travel as what they extend.

    Args:
        refer: gives the reference to an object that is of no such type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # As text a large number is slow to write and to read, and longer than the interpreter allows.
        return int(value) if -(2**63) < value < 2**63 else ["int", hex(value)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return ["bytes" if isinstance(value, bytes) else "bytearray", bytes(value).decode("latin-1")]
    if STANDARD.get(type(value).__name__) == type(value).__module__.partition(".")[0]:
        return [type(value).__name__, *(encode(item, refer) for item in parts_of(value))]
    if isinstance(value, tuple) and isinstance(fields := getattr(type(value), "_fields", None), tuple):
        return ["namedtuple", type(value).__name__, list(fields), *(encode(item, refer) for item in value)]
    for name in ("list", "tuple", "set", "frozenset"):
        if isinstance(value, getattr(builtins, name)):
            return [name, *(encode(item, refer) for item in value)]
    if isinstance(value, dict):
        return ["dict", *([encode(key, refer), encode(item, refer)] for key, item in value.items())]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, type) and value in vars(builtins).values():
        return ["type", type.__getattribute__(value, "__name__")]
    return refer(value)


def parts_of(value: Any) -> list[Any]:
    """The arguments for `made` to make a value of a type in STANDARD."""
    match type(value).__name__:
        case "deque":
            return [list(value), value.maxlen]
        case "Counter" | "OrderedDict":
            return [dict(value)]
        case "defaultdict":
            factory = value.default_factory
            return [factory if factory in vars(builtins).values() else None, dict(value)]
        case "date" | "datetime" | "time":
            return [value.isoformat()]
        case "timedelta":
            return [value.days, value.seconds, value.microseconds]
        case "timezone":
            return [value.utcoffset(None)]
    return [str(value)]  # the others read what they write


def made(name: str, parts: list[Any]) -> Any:
    kind = getattr(__import__(STANDARD[name]), name)
    return kind.fromisoformat(*parts) if name in ("date", "datetime", "time") else kind(*parts)


def decode(data: Any, resolve: Callable[[list[Any]], Any]) -> Any:
    """The value of `encode`'s result, of exactly a builtin type, one in STANDARD, or a namedtuple.

    Args:
        resolve: returns the object of a reference.

    Raises:
        Exception: the data are no such result.
    """
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("a message holds a JSON object")
        return data
    kind, *items = data
    if kind == "int":
        return int(items[0], 16)
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind)(items[0].encode("latin-1"))
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)([decode(item, resolve) for item in items])
    if kind == "dict":
        return {decode(key, resolve): decode(item, resolve) for key, item in items}
    if kind in ("complex", "range"):
        return getattr(builtins, kind)(*items)
    if kind == "type" and isinstance(getattr(builtins, items[0]), type):
        return getattr(builtins, items[0])
    if kind in STANDARD:
        return made(kind, [decode(item, resolve) for item in items])
    if kind == "namedtuple":
        from collections import namedtuple

        name, fields, *values = items
        return namedtuple(name, fields)(*(decode(value, resolve) for value in values))
    return resolve(data)


def reason_of(error: BaseException) -> str:
    """The type and the message of an error, cut. What the program raises may have a __str__ that raises."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")[:MAX_REASON_CHARACTERS]
    except Exception:
        return type(error).__name__
