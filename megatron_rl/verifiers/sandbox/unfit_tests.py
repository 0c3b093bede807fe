"""Tests that can judge no program, found by reading them: what `code.verify` and the check before a run share.

Invariants (tests/unit/verifiers): a test is only read here, and never run; a test is rejected only if no program can
pass it, or every program passes it. `suspicion` is for the rest: it explains a failure, once a test has failed.
"""

from __future__ import annotations

import ast
import builtins
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

from megatron_rl.verifiers.sandbox.messages import reason_of
from megatron_rl.verifiers.sandbox.script import compiled

Node = TypeVar("Node", bound=ast.AST)

MAX_CHARACTERS = 1 << 20
"""A longer test is not read, because that takes seconds. Whether it can be run is then known when it runs."""
OF_JSON = {"null": "None", "true": "True", "false": "False", "NaN": "float('nan')", "Infinity": "float('inf')"}
PACKAGES = frozenset("np numpy pd pandas pytest scipy sympy torch".split())
"""Names of packages that programs and tests do not have, as tests abbreviate them."""
COMPARES = frozenset("is_close isclose allclose approx almost_equal assert_almost_equal assert_allclose".split())
"""Names of functions that compare, as tests use them."""
ENDS = frozenset("exit _exit quit abort".split())
FIXTURES = frozenset("capsys capfd caplog monkeypatch recwarn tmp_path".split())
"""What pytest would give to a test."""
READS_OUTPUT = frozenset(
    "getvalue readouterr call_args call_args_list call_count called mock_calls assert_called assert_called_once"
    " assert_called_with assert_called_once_with assert_any_call assert_has_calls assert_not_called".split()
)
SETS = frozenset(["sys.argv", "sys.stdin", "os.environ", "builtins", "__builtins__"])
"""What a test sets for the program alone."""
CAPTURES = frozenset(
    "redirect_stdout redirect_stderr stdin stdout stderr patch monkeypatch capsys environ argv putenv seed addHandler"
    " assertLogs caplog catch_warnings assertWarns tempfile NamedTemporaryFile TemporaryDirectory mkstemp mkdtemp"
    " tmp_path write_text write_bytes chdir".split()
)
"""Names of a failed test that captures what the program prints, feeds it, or changes its surroundings. Its row says
so; the test can be written as an `input` and an `output`."""
INSPECTS = frozenset(
    "signature getfullargspec getsource getsourcelines getmembers isclass isfunction ismethod isgeneratorfunction"
    " iscoroutinefunction isasyncgenfunction".split()
)
"""Functions of the module `inspect` that see what stands for an object of the program, and not the object."""
ELSEWHERE = "but the program runs in another process"


@lru_cache(maxsize=256)  # a group's answers have the same tests
def fault_of_test(text: str) -> str | None:
    """Why no program could be judged by this Python text; None if there is no reason that reading it shows."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of `assert (x, "text")`, which is told below
            compiled(text, "test")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{text.strip()[:80]!r} is no Python: {reason_of(error)}"
    rules = _fault_of_imports, _fault_of_names, _fault_of_asserts, _fault_of_setting, _fault_of_objects
    return next((fault for rule in rules if (fault := rule(tree))), None)


@lru_cache(maxsize=256)
def suspicion(text: str) -> str | None:
    """Why the program may not be to blame for a failure of this test; None if there is no such reason."""
    if len(text) > MAX_CHARACTERS:
        return None
    tree = ast.parse(text)
    names = set(_names(tree))
    found = CAPTURES & names
    if not _only_seeds(tree):
        found -= {"seed"}
    if "catch_warnings" in found and not any(word.arg == "record" for word in _all(tree, ast.keyword)):
        found -= {"catch_warnings"}
    if any(isinstance(call.func, ast.Name) and call.func.id == "open" for call in _all(tree, ast.Call)):
        found |= {"open"}
    if not found:
        return None
    return f"it uses {min(found)}, but the program prints, reads and has its files and settings in another process"


def _fault_of_imports(tree: ast.Module) -> str | None:
    """A test that catches the error of an import, or imports under a condition, has a way without it."""
    for node in _outside(tree, ast.If, ast.Try):
        if isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        else:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            if module.partition(".")[0] not in sys.stdlib_module_names:
                return (
                    f"it imports {module}, which programs and tests do not have; import the standard library alone, "
                    f"and use the program's functions by their names, without an import"
                )
    return None


def _fault_of_names(tree: ast.Module) -> str | None:
    """The fault of a test by the names that it does not define. Most of them may be the program's; some never are."""
    if any(alias.name == "*" for alias in _all(tree, ast.alias)):
        return None
    loaded = {node.id for node in _all(tree, ast.Name) if isinstance(node.ctx, ast.Load)}
    free = {name for name in loaded - _bound(tree) if not hasattr(builtins, name)}
    if names := free & OF_JSON.keys():
        name = min(names)
        return f"it uses {name}, which is JSON; write {OF_JSON[name]}"
    owners = {node.value.id for node in _all(tree, ast.Attribute) if isinstance(node.value, ast.Name)}
    if names := free & PACKAGES & owners:
        return f"it uses {min(names)}, a package that programs and tests do not have; use the standard library alone"
    if (names := free & COMPARES) and free - names:
        return f"it judges by {min(names)}, which it neither defines nor imports; define it in the test"
    return None


def _fault_of_asserts(tree: ast.Module) -> str | None:
    """A test fails by an assert, an error that it raises, a function of a module that asserts, or an end; or, if it
    hands on text to run, by what nobody can read. Functions of the program are no such, however they are called."""
    imported = {alias.asname or alias.name.partition(".")[0] for alias in _all(tree, ast.alias)}
    asserts = list(_all(tree, ast.Assert))
    judges = any(_can_fail(node.test) for node in asserts) or any(_all(tree, ast.Raise))
    for call in _all(tree, ast.Call):
        if path_of(call.func) == "unittest.main":  # it looks in the module `__main__`, and then ends the process
            return "it calls unittest.main, which finds no tests here; write asserts that call the program's functions"
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        known = isinstance(call.func, ast.Attribute) or name in imported or hasattr(builtins, name)
        judges |= known and (name.lower().startswith(("assert", "fail", "raises")) or name in ENDS)
        judges |= name in ("exec", "eval") or name == "main" and known
    if not judges and not any(alias.name == "*" for alias in _all(tree, ast.alias)):
        if any(isinstance(node.test, ast.Tuple) for node in asserts):
            return "its assert is a tuple, which is always true; write `assert f(1) == 2, 'text'` without parentheses"
        return "it asserts nothing, so every program would pass it; write `assert f(1) == 2`"
    # Imports, definitions and texts do nothing to the program.
    if all(_only_defines(node) for node in tree.body):
        return "it defines functions and calls none, so it passes without using the program; call them at its end"
    return None


def _can_fail(test: ast.expr) -> bool:
    return not (isinstance(test, ast.Tuple) and test.elts or isinstance(test, ast.Constant) and test.value)


def _only_defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        inner = (ast.Assign, ast.AnnAssign)
        return not node.decorator_list and all(isinstance(one, inner) or _only_defines(one) for one in node.body)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return not node.decorator_list
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom | ast.Pass)


def _fault_of_setting(tree: ast.Module) -> str | None:
    reads_output = bool(READS_OUTPUT & set(_names(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            for path in (path_of(target) for target in targets if isinstance(target, ast.Attribute | ast.Subscript)):
                if any(path == one or path.startswith(one + ".") for one in SETS):
                    return f"it sets {path}, {ELSEWHERE}; give its surroundings as arguments or as an `input`"
                if path in ("sys.stdout", "sys.stderr") and reads_output:
                    return f"it reads what the program prints by {path}, {ELSEWHERE}; write an `output`"
        if isinstance(node, ast.arg) and node.arg in FIXTURES:
            return f"it needs {node.arg} of pytest, {ELSEWHERE}; write an `input` and an `output`"
        if isinstance(node, ast.Call):
            path, first = path_of(node.func), node.args[0] if node.args else None
            if path.rpartition(".")[2] in ("redirect_stdout", "redirect_stderr") and reads_output:
                return f"it reads what the program prints by {path}, {ELSEWHERE}; write an `output`"
            if path in ("os.environ.update", "os.environ.setdefault", "os.putenv"):
                return f"it calls {path}, {ELSEWHERE}; give its surroundings as arguments"
            replaced = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
            fed = (
                replaced in ("builtins.input", "sys.stdin", "sys.argv")
                or reads_output
                and (replaced in ("builtins.print", "sys.stdout", "sys.stderr"))
            )
            if path.rpartition(".")[2] == "patch" and fed:
                return f"it replaces {replaced}, {ELSEWHERE}; write an `input` and an `output`"
    return None


def _fault_of_objects(tree: ast.Module) -> str | None:
    """What a test cannot do with an object of the program: look into it, and have it end an error."""
    bound = _bound(tree)

    def is_own(node: ast.expr) -> bool:
        while isinstance(node, ast.Call | ast.Attribute):
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id not in bound and not hasattr(builtins, node.id)

    for node in _all(tree, ast.Call):
        name = path_of(node.func).rpartition(".")[2]
        if name in INSPECTS and node.args and is_own(node.args[0]):
            return f"it looks at an object of the program by {name}, {ELSEWHERE}; judge what it returns"
    for block in _outside(tree, ast.Try):
        if isinstance(block, ast.With | ast.AsyncWith) and any(is_own(item.context_expr) for item in block.items):
            if any(isinstance(node, ast.Raise) for node in _outside(block, ast.Try)):
                return "it raises an error that an object of the program would have to end, which none can do in a test"
    return None


def path_of(node: ast.AST) -> str:
    """`a.b` for `a.b`, and for an item of it; empty for what is no name with attributes."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        owner = path_of(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _only_seeds(tree: ast.Module) -> bool:
    """Whether a test gives the module `random` a seed, and draws no random numbers itself."""
    used = {path for node in _all(tree, ast.Attribute) if (path := path_of(node)).startswith("random.")}
    named = {alias.name for node in _all(tree, ast.ImportFrom) if node.module == "random" for alias in node.names}
    return used | {f"random.{name}" for name in named} == {"random.seed"}


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.alias(name=name):
                yield from name.split(".")


def _bound(tree: ast.Module) -> set[str]:
    """The names that a test defines somewhere."""
    bound = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound.add(name)
            case ast.MatchMapping(rest=str(name)):
                bound.add(name)
            case ast.Global(names=names):
                bound.update(names)
    return bound


def _outside(node: ast.AST, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    """The statements in a node, without what is inside statements of these kinds."""
    for inner in ast.iter_child_nodes(node):
        yield inner
        if not isinstance(inner, (ast.expr, *kinds)):
            yield from _outside(inner, *kinds)


def _all(tree: ast.Module, kind: type[Node]) -> Iterator[Node]:
    return (node for node in ast.walk(tree) if isinstance(node, kind))
