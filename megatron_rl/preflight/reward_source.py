"""Checks a function of the user's own in the source of its module, without running it: whether it exists, and for a
reward its arguments."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection, Iterator
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec
from keyword import iskeyword
from pathlib import Path

from megatron_rl.config.function import VALUES, ImportPath, load_function, short_path
from megatron_rl.config.rewards import FunctionReward, ImportedReward

Definition = ast.FunctionDef | ast.AsyncFunctionDef


def fault_of_function(path: str, key: str) -> str | None:
    """The fault of the function at `package.module:function` or `folder/file.py:function`, as one sentence; None if
    there is none. Its arguments are not checked.

    Args:
        key: the configuration key that names the function.
    """
    found = definition(path, key)
    return found if isinstance(found, str) else None


def fault_of_reward(reward: ImportedReward, columns: Collection[str] | None) -> str | None:
    """The fault of a reward function, as one sentence; None if there is none.

    Args:
        columns: the columns of the training rows without the prompt; None if they are not known.
    """
    found = definition(reward.path, "rewards")
    if isinstance(found, str):
        return found
    takes_columns = isinstance(reward, FunctionReward)
    if takes_columns and (twice := sorted(set(reward.given) & set(columns or ()))):
        return (
            f"rewards: the training rows have a column {twice[0]!r}, but {reward.path} gets an argument of this name "
            f"from the run; rename the column"
        )
    if found is None:
        return None
    file, node = found
    offered = {*reward.given, *((columns or ()) if takes_columns else ())}
    complete = columns is not None or not takes_columns
    if isinstance(node, ast.ClassDef):
        fault = _fault_of_class(node, offered, complete, reward.arguments)
    elif isinstance(node, Definition) and not node.decorator_list:  # a decorator may change the arguments
        fault = _fault_of_arguments(node, {*offered, *reward.arguments}, complete)
        fault = fault or _fault_of_unknown(node, reward.arguments)
    else:
        fault = None
    where = f"{reward.path}: {file}:{node.lineno}" if file else short_path(reward.path)
    return f"rewards: {where}: {fault}" if fault else None


def definition(path: str, key: str) -> str | tuple[str, ast.stmt] | None:
    """The file and the statement that binds the function's name; or the fault; or None if there is no source. A
    function that goes by value has no file, and only its arguments."""
    module, colon, name = path.rpartition(":")
    if not (module and colon and name):
        return f"{key}: the path {path!r} must read `package.module:function` or `folder/file.py:function`"
    file = ImportPath(path).file
    if file is not None:
        origin: str | None = str(file)
        if not file.is_file():
            return f"{key}: {path}: there is no file {module}; correct the path (it is relative to {Path.cwd()})"
        if file.suffix == VALUES:
            return _by_value(path, key, name)
    else:
        spec = _find(module)
        if spec is None:
            folders = ", ".join(str(Path(folder).resolve()) for folder in sys.path[:2])
            return (
                f"{key}: {path}: there is no module {module!r} in the folders of PYTHONPATH ({folders}, ...); put its "
                f"folder on PYTHONPATH, or correct the path"
            )
        origin = spec.origin
    if not origin or not origin.endswith(".py"):
        return None  # a compiled module or a namespace package has no source
    try:
        tree = ast.parse(Path(origin).read_bytes(), origin)
    except SyntaxError as error:
        return f"{key}: {path}: {origin}:{error.lineno}: {error.msg}; correct the module"
    found = None
    for bound, node in _bindings(tree.body):
        if bound in (name, "*"):
            found = node
    if found is None:
        return f"{key}: {path}: {origin} has no function {name!r}; correct the path or write the function"
    return origin, found


def _by_value(path: str, key: str, name: str) -> str | tuple[str, ast.stmt] | None:
    try:
        function = load_function(path)
        signature = inspect.signature(function)
    except ValueError as error:  # Python knows no signature, or the function cannot be loaded
        return None if str(error).startswith("no signature") else f"{key}: {error}"
    if not inspect.isfunction(function):
        return None
    taken = [
        one.replace(annotation=one.empty, default=one.empty if one.default is one.empty else None)
        for one in signature.parameters.values()
    ]
    plain = inspect.Signature(taken)
    # A lambda is saved as `lambda`, which is a keyword.
    named = name if name.isidentifier() and not iskeyword(name) else "function"
    [node] = ast.parse(f"def {named}{plain}: ...").body
    return "", node


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


def _fault_of_class(
    node: ast.ClassDef, offered: Collection[str], complete: bool, arguments: Collection[str]
) -> str | None:
    """The fault of a class whose constructor gets `arguments`, and whose objects are called with what is offered."""
    if node.bases or node.decorator_list:
        return None  # methods may come from elsewhere
    methods = {method.name: method for method in node.body if isinstance(method, Definition)}
    if "__call__" not in methods:
        return f"the class {node.name} has no method __call__, which must score the answers; write it"
    made, called = methods.get("__init__"), methods["__call__"]
    if made is None and arguments:
        return f"the class {node.name} has no __init__ for its `arguments`; remove them, or write it"
    fault = None
    if made is not None and not made.decorator_list:
        fault = _fault_of_unknown(made, arguments) or _fault_of_arguments(made, arguments, True, is_method=True)
    if fault is None and not called.decorator_list:
        fault = _fault_of_arguments(called, offered, complete, is_method=True)
    return fault


def _fault_of_arguments(
    function: Definition, offered: Collection[str], complete: bool, *, is_method: bool = False
) -> str | None:
    """The fault of a function that gets the offered arguments that it names, by their names.

    Args:
        complete: whether nothing else is offered.
    """
    taken = function.args
    positional = [*taken.posonlyargs, *taken.args]
    required = [arg.arg for arg in positional[is_method : len(positional) - len(taken.defaults)]]
    unnamed = [name for name in required if name in {arg.arg for arg in taken.posonlyargs}]
    if unnamed:
        return f"{_signature(function)} takes {unnamed[0]!r} by its position alone; remove the `/` from its arguments"
    required += [arg.arg for arg, value in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if value is None]
    if complete and (absent := [name for name in required if name not in offered]):
        return (
            f"{_signature(function)} asks for the argument {absent[0]!r}, which nobody offers (offered are "
            f"{', '.join(sorted(offered)) or 'none'}); rename it or a column of the rows, give it a default, or set it "
            f"in the reward's `arguments`"
        )
    return None


def _fault_of_unknown(function: Definition, arguments: Collection[str]) -> str | None:
    """The fault of a function that gets these arguments from the configuration."""
    taken = function.args
    known = {arg.arg for arg in [*taken.args, *taken.kwonlyargs]}
    if taken.kwarg is None and (unknown := sorted(set(arguments) - known)):
        return f"{_signature(function)} does not take {unknown[0]!r}, which the reward's `arguments` give; correct them"
    return None


def _signature(function: Definition) -> str:
    return f"{function.name}({ast.unparse(function.args)})"
