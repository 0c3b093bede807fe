"""The messages between a program and its tests. Only the standard library is used, as in script.py.

Invariants: a message is a line of JSON, so nothing in it can run; `decode` makes only values of builtin types, of
namedtuples, and of the types in STANDARD and VIEWS, so their operators are Python's own.
"""

from __future__ import annotations

import builtins
import json
import os
import sys

TYPE_CHECKING = False  # the module typing needs 5 ms for its import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

STANDARD = {
    "deque": "collections",
    "Counter": "collections",
    "OrderedDict": "collections",
    "defaultdict": "collections",
    "ChainMap": "collections",
    "UserDict": "collections",
    "UserList": "collections",
    "UserString": "collections",
    "Decimal": "decimal",
    "Fraction": "fractions",
    "date": "datetime",
    "datetime": "datetime",
    "time": "datetime",
    "timedelta": "datetime",
    "timezone": "datetime",
    "ZoneInfo": "zoneinfo",
    "UUID": "uuid",
    "PurePosixPath": "pathlib",
    "PosixPath": "pathlib",
}
"""Types of the standard library that travel, and their modules, which are imported where they are needed."""
VIEWS: dict[str, Callable[..., Any]] = {
    "dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "dict_items": lambda items: dict(items).items(),
    "mappingproxy": type(vars(type)),
    "memoryview": memoryview,
}
"""Builtin types without a name, or without a copy: for each, what makes it of a list, a dict or bytes."""
CONSTANTS = {"Ellipsis": ..., "NotImplemented": NotImplemented}
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
    if type(value).__name__ in VIEWS and type(value).__module__ == "builtins":
        return [type(value).__name__, encode(contents_of(value), refer)]
    if any(value is constant for constant in CONSTANTS.values()):
        return ["constant", str(value)]
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
            return [value.default_factory, dict(value)]
        case "ChainMap":
            return list(value.maps)
        case "UserDict" | "UserList":
            return [value.data]
        case "date":
            return [value.isoformat()]
        case "datetime" | "time":
            if type(value.tzinfo).__name__ in ("timezone", "ZoneInfo"):
                return [value.replace(tzinfo=None).isoformat(), value.fold, value.tzinfo]
            return [value.isoformat(), value.fold, None]  # a zone of the program's own is an offset
        case "timedelta":
            return [value.days, value.seconds, value.microseconds]
        case "timezone":
            return list(value.__getinitargs__())
        case "ZoneInfo":
            return [value.key]
    return [str(value)]  # the others read what they write


def made(name: str, parts: list[Any]) -> Any:
    kind = getattr(__import__(STANDARD[name]), name)
    if name not in ("date", "datetime", "time"):
        return kind(*parts)
    text, *more = parts
    value = kind.fromisoformat(text)
    if not more:
        return value
    fold, zone = more
    return value.replace(fold=fold) if zone is None else value.replace(fold=fold, tzinfo=zone)


def contents_of(view: Any) -> Any:
    """What a function in VIEWS makes a view of."""
    if isinstance(view, memoryview):
        return bytes(view)
    return list(view) if type(view).__name__.startswith("dict_") else dict(view)


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
    if kind in VIEWS:
        return VIEWS[kind](decode(items[0], resolve))
    if kind == "constant":
        return CONSTANTS[items[0]]
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


def line_of(error: BaseException) -> int:
    """The last line of the test through which the error went."""
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "test":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def sent_error(error: BaseException) -> list[str]:
    """An error of the tests as JSON: the name of its nearest builtin class, and its text. Messages of assertions are
    withheld, because the program could read the expected value."""
    name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return [name, "" if isinstance(error, AssertionError) else str(error)]


class ProgramError(Exception):
    """The program raised what is no Exception, such as SystemExit."""


def sent_exception(error: BaseException) -> list[Any]:
    """An exception as JSON: the modules and names of its classes, the nearest first; its arguments and its attributes,
    as far as they are plain data; and its text."""

    def refuse(value: Any) -> list[Any]:
        raise TypeError(f"an object of type {type(value).__name__} is no data")

    def plain(value: Any) -> Any:
        return value if isinstance(value, str | int | float | None) else encode(value, refuse)

    arguments, attributes = [], {}
    for item in error.args:
        try:
            arguments.append(plain(item))
        except (TypeError, ValueError, RecursionError):
            arguments.append(reason_of(error))
    for name, item in vars(error).items():
        try:
            attributes[name] = plain(item)
        except (TypeError, ValueError, RecursionError):
            continue
    classes = [[kind.__module__, kind.__name__] for kind in type(error).__mro__]
    return [classes, arguments, attributes, reason_of(error)]


def exception_class(module: Any, name: Any, named: set[str]) -> Any:
    """The exception class with this name that a test may expect; None if there is none.

    Args:
        named: the names that the test uses. Another class of the standard library would only serve the program: with
            `unittest.SkipTest` it could end a test that has not failed yet.
    """
    if name in named and str(module).partition(".")[0] in sys.stdlib_module_names:
        kind = vars(sys.modules.get(module, builtins)).get(name)  # what a test names it has imported
    else:
        kind = getattr(builtins, str(name), None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


def exception_of(
    operation: str, classes: list[Any], arguments: list[Any], attributes: dict[str, Any], reason: str
) -> Exception:
    """The exception that is nearest to what the program raised.

    Args:
        classes: its class and its base classes, the nearest first; None for one that is not known here.
    """
    for kind in classes:
        # StopIteration would end a loop of the test, with the asserts that are still to come.
        if kind is None:
            continue
        if operation in ("next", "anext") or not issubclass(kind, StopIteration | StopAsyncIteration):
            try:
                error: Exception = kind(*arguments)
            except (TypeError, ValueError):  # it needs other arguments than it keeps, or refuses these
                if kind.__module__ == "builtins":  # the class that it extends takes any
                    continue
                error = kind.__new__(kind, *arguments)
            vars(error).update((name, item) for name, item in attributes.items() if not name.startswith("__"))
            return error
    return ProgramError(reason)
