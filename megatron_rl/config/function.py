"""Functions that a configuration names by their import paths."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast


def load_function(path: str) -> Callable[..., Any]:
    """Import `package.module:function`.

    Raises:
        ValueError: the path has another form, the module cannot be imported, or it has no such function.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"the function path {path!r} must read `package.module:function`")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"function {path!r}: {error}; is its folder on PYTHONPATH?") from error
    except SyntaxError as error:
        raise ValueError(f"function {path!r}: {error}") from error
    function: Any = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"function {path!r}: {module.__file__} has no function {name!r}")
    return cast(Callable[..., Any], function)
