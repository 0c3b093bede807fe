"""What the tests can ask of an object of the program, in the program's process (`program_tests.py`). Only the standard
library is used, as in script.py."""

from __future__ import annotations

import _operator
import builtins

TYPE_CHECKING = False  # the module typing needs 5 ms for its import
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any

LOOPS: list[Any] = []
"""The event loop of this process, once it has one."""


def awaited(value: Awaitable[Any]) -> Any:
    """What an awaitable gives. All share one loop, because what waits in it may belong together."""
    import asyncio  # it needs 50 ms

    if not LOOPS:
        LOOPS.append(asyncio.new_event_loop())
    return LOOPS[0].run_until_complete(value)


def error_of(sent: Any) -> tuple[Any, Any, None]:
    """What `__exit__` gets for an error of the tests: its name and its text; or for None."""
    if sent is None:
        return None, None, None
    error = getattr(builtins, sent[0])(sent[1])
    return type(error), error, None


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, arguments, options: function(*arguments, **options),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": lambda container, key: container[key],
    "setitem": lambda container, key, value: container.__setitem__(key, value),
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "eq": lambda one, other: bool(one == other),
    "isinstance": isinstance,
    "operate": lambda name, *values: (getattr(_operator, name, None) or getattr(builtins, name))(*values),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager, error: type(manager).__exit__(manager, *error_of(error)),
    "await": awaited,
    "aenter": lambda manager: awaited(type(manager).__aenter__(manager)),
    "aexit": lambda manager, error: awaited(type(manager).__aexit__(manager, *error_of(error))),
    "aiter": aiter,
    "anext": lambda values: awaited(anext(values)),
}
"""The name of an operation -> its implementation. `operate` has the name of a function of the module `operator`, or of
a builtin one."""
