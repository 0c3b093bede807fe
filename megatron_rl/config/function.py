"""Functions that a configuration names by their import paths or by their files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, cast

from pydantic import AfterValidator

from megatron_rl.config.exception_text import place, said
from megatron_rl.config.package_files import find_shipped
from megatron_rl.ports import StopRequested

VALUES = ".pickle"
"""The ending of a file that holds functions of a script or of a notebook, which no other process can import: by value,
by their names, as cloudpickle writes them."""


class ImportPath(str):
    """The place of a function or class: `package.module:name`, `folder/file.py:name` or `folder/file.pickle:name`. A
    file that ships with the package (`recipes/...`) is found from any working folder."""

    __slots__ = ()

    @property
    def module(self) -> str:
        return self.rpartition(":")[0]

    @property
    def file(self) -> Path | None:
        """The file, if the path names one."""
        return find_shipped(Path(self.module)) if self.module.endswith((".py", VALUES)) else None

    def absolute(self) -> ImportPath:
        """The same with its file made absolute."""
        return self if self.file is None else ImportPath(f"{self.file.absolute()}:{self.rpartition(':')[2]}")


def source_file(path: ImportPath) -> Path | None:
    """The file that has the function or class; None if no module has this name."""
    if path.file is not None:
        return path.file
    try:
        spec = importlib.util.find_spec(path.module)
    except (ImportError, ValueError):  # a package above it is missing, or has no place
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def short_path(path: str) -> str:
    """The path for a sentence. Functions of a script have a long one, inside the run's own folder; their names do."""
    return path.rpartition(":")[2] if ImportPath(path).module.endswith(VALUES) else path


FunctionPath = Annotated[str, AfterValidator(ImportPath)]
"""The type of a configuration key that names a function or a class."""


def load_function(path: str) -> Callable[..., Any]:
    """Import `package.module:function`, or load `folder/file.py:function`. A file is loaded once in a process.

    Raises:
        ValueError: the path has another form, the module cannot be imported, or it has no such function.
    """
    module_name, colon, name = path.rpartition(":")
    file = ImportPath(path).file
    if not (module_name and colon and name):
        raise ValueError(f"the function path {path!r} must read `package.module:function` or `folder/file.py:function`")
    try:
        module = importlib.import_module(module_name) if file is None else _of_file(file)
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
    except StopRequested:
        raise
    except BaseException as error:  # the lines of a user's module may raise anything
        raise ValueError(f"function {path!r}: its module raised {said(error)}{place(error)}") from error
    function: Any = vars(module).get(name)
    if name in vars(module) and not callable(function):
        kind = type(function).__name__
        raise ValueError(f"function {path!r}: {name!r} is no function and no class, but an object of the type {kind}")
    if not callable(function):
        raise ValueError(f"function {path!r}: {module.__file__} has no function {name!r}")
    return cast(Callable[..., Any], function)


def _of_file(file: Path) -> ModuleType:
    """The module of a file. Its name is the file's whole path, so that it can hide no other module."""
    name = str(file.resolve(strict=True))
    if name in sys.modules:
        return sys.modules[name]
    if file.suffix == VALUES:
        import cloudpickle

        sys.modules[name] = module = ModuleType(name)
        module.__file__ = name
        vars(module).update(cloudpickle.loads(file.read_bytes()))
        return module
    spec = importlib.util.spec_from_file_location(name, name)
    assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # dataclasses look their module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
