"""Functions that a configuration names by their import paths or by their files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast


def load_function(path: str) -> Callable[..., Any]:
    """Import `package.module:function`, or load `folder/file.py:function`. A file is loaded once in a process.

    Raises:
        ValueError: the path has another form, the module cannot be imported, or it has no such function.
    """
    module_name, colon, name = path.rpartition(":")
    if not (module_name and colon and name):
        raise ValueError(f"the function path {path!r} must read `package.module:function` or `folder/file.py:function`")
    try:
        module = _of_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except FileNotFoundError as error:
        raise ValueError(f"function {path!r}: there is no file {module_name}; correct the path") from error
    except ModuleNotFoundError as error:
        raise ValueError(f"function {path!r}: {error}; is its folder on PYTHONPATH?") from error
    except SyntaxError as error:
        raise ValueError(f"function {path!r}: {error}") from error
    except SystemExit as error:  # a script, whose last lines are not under `if __name__ == "__main__"`
        raise ValueError(
            f"function {path!r}: {module_name} calls exit when it is imported; put what it runs as a script under "
            f'`if __name__ == "__main__":`'
        ) from error
    function: Any = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"function {path!r}: {module.__file__} has no function {name!r}")
    return cast(Callable[..., Any], function)


def _of_file(file: str) -> ModuleType:
    """The module of a file. Its name is the file's whole path, so that it can hide no other module."""
    name = str(Path(file).resolve(strict=True))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, name)
    assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
