"""Checks a function of the user's own in the source of its module, without running it: whether it exists, and for a
reward its arguments."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec
from pathlib import Path

GIVEN = ("prompts", "completions", "completion_ids")
"""The arguments with which every reward function is called, in addition to the columns of the rows."""


def fault_of_function(path: str, columns: Collection[str] | None, key: str = "rewards") -> str | None:
    """The fault of the function at `package.module:function`, as one sentence; None if there is none.

    Args:
        columns: the columns of the rows without the prompt; None if they are not known.
        key: the configuration key that names the function. Only the arguments of rewards are checked.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        return f"{key}: the path {path!r} must read `package.module:function`"
    spec = _find(module)
    if spec is None:
        folders = ", ".join(str(Path(folder).resolve()) for folder in sys.path[:2])
        return (
            f"{key}: {path}: there is no module {module!r} in the folders of PYTHONPATH ({folders}, ...); put its "
            f"folder on PYTHONPATH, or correct the path"
        )
    if not spec.origin or not spec.origin.endswith(".py"):
        return None  # a compiled module or a namespace package has no source
    try:
        tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except SyntaxError as error:
        return f"{key}: {path}: {spec.origin}:{error.lineno}: {error.msg}; correct the module"
    found = None
    for bound, node in _bindings(tree.body):
        if bound in (name, "*"):
            found = node
    if found is None:
        return f"{key}: {path}: {spec.origin} has no function {name!r}; correct the path or write the function"
    if key == "rewards" and isinstance(found, ast.FunctionDef) and (fault := _fault_of_arguments(found, columns)):
        return f"{key}: {path}: {spec.origin}:{found.lineno}: {fault}"
    return None


def _find(module: str) -> ModuleSpec | None:
    """Finds a module like importlib.util.find_spec, but without importing its parent packages."""
    invalidate_caches()
    places, spec, name = None, None, ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = next((found for finder in sys.meta_path if (found := finder.find_spec(name, places))), None)
        if spec is None:
            return None
        places = spec.submodule_search_locations or []
    return spec


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yields (name, statement) for every name that the statements of a module bind, also inside `if`, `try` and
    `with`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                (part.id, node) for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)
            )
        else:
            for field in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(node, field, []):
                    yield from _bindings(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _fault_of_arguments(function: ast.FunctionDef, columns: Collection[str] | None) -> str | None:
    taken = function.args
    positional = [*taken.posonlyargs, *taken.args]
    required = [arg.arg for arg in positional[: len(positional) - len(taken.defaults)]]
    required += [arg.arg for arg, value in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if value is None]
    given = {*GIVEN, *(columns or ())}
    if columns is not None and (absent := [name for name in required if name not in given]):
        return (
            f"{function.name} asks for the argument {absent[0]!r}, and the training rows have no such column (they "
            f"have {', '.join(sorted(columns)) or 'none'}); rename one of them, or give the argument a default"
        )
    known = {arg.arg for arg in [*positional, *taken.kwonlyargs]}
    if taken.kwarg is None and (refused := sorted(given - known)):
        return (
            f"{function.name} does not take {refused[0]!r}, which it is called with; end its arguments with **columns"
        )
    return None
