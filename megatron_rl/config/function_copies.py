"""Functions of a script or of a notebook, for processes that cannot import it.

Invariant (tests/unit/config): a function that can be imported goes by its import path; any other one goes by value,
with the variables that it uses, or is refused with the variable that cannot be copied.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

UNCOPIED = (TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError, pickle.PicklingError, OSError)
"""What pickling raises for locks, open files, connections, and the like."""


class Functions:
    """The functions and classes of a configuration: by their import paths, or by value in a file if no other process
    can import them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._functions: dict[str, Callable[..., Any]] = {}

    def named(self, value: Any) -> Any:
        """The same configuration with a path in the place of each function, and plain numbers of Python."""
        if isinstance(value, Mapping):
            return {key: self.named(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.named(one) for one in value]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if callable(value):
            return self._path_of(value)
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        return float(value) if isinstance(value, Decimal) else value

    def save(self, into: Path) -> None:
        """
        Args:
            into: the folder that will take the place of the path's own.
        """
        import cloudpickle

        if self._functions:
            (into / self._path.name).write_bytes(cloudpickle.dumps(self._functions))

    def _path_of(self, function: Callable[..., Any]) -> str:
        import cloudpickle

        module, name = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "")
        if module != "__main__" and vars(sys.modules.get(module, self)).get(name) is function:
            return f"{module}:{name}"
        name = getattr(function, "__name__", type(function).__name__).strip("<>")
        while self._functions.get(name, function) is not function:
            name += "_"
        try:
            if any(isinstance(value, io.IOBase) for value in _variables(function).values()):
                raise TypeError("an open file")  # cloudpickle would copy the text of a file that is read
            cloudpickle.dumps(function)
        except UNCOPIED as error:
            raise ValueError(
                f"the function {name} cannot be sent to other processes: {_culprit(function) or error}; make it inside "
                f"the function, or write the function into a file and give its path, `my_file.py:{name}`"
            ) from error
        self._functions[name] = function
        return f"{self._path}:{name}"


def _variables(function: Callable[..., Any]) -> dict[str, Any]:
    """The attributes of a function or of an object, and the variables that a function uses."""
    variables = dict(vars(function)) if hasattr(function, "__dict__") else {}
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        variables |= {**used.globals, **used.nonlocals}
    return variables


def _culprit(function: Callable[..., Any]) -> str | None:
    """The variable of a function that cannot be copied."""
    import cloudpickle

    for name, value in _variables(function).items():
        told = f"its variable {name!r} is a {type(value).__name__}, which cannot be copied"
        if isinstance(value, io.IOBase):
            return told
        try:
            cloudpickle.dumps(value)
        except UNCOPIED:
            return told
    return None
