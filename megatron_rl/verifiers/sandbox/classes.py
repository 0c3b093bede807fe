"""Finds the names of a program that a test uses as classes, by reading the test.

A program may define a name as a function or as a class, and may make either of them return any object. So its word
about a name is worth nothing: what the test does with the objects decides. Names with a small letter are functions.

Invariant (tests/unit/verifiers): a name whose results are only compared with values, also after an operator
(`abs(Area(1) - 2.5) < 1e-6`), is no class, and no value of the test is then sent to what it returns (`remote.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache

from megatron_rl.verifiers.sandbox.unfit_tests import MAX_CHARACTERS, path_of

OF_BUILTIN_TYPES = frozenset().union(*map(dir, (str, bytes, int, float, complex, list, tuple, dict, set)))
"""Attributes that the result of a function has too."""

Rule = Callable[[ast.AST], bool]


@lru_cache(maxsize=256)  # a group's answers have the same tests
def classes_of(text: str) -> frozenset[str]:
    """The names in a test's text that it uses as classes: it uses their objects, and not only their results. A text
    that is too long to be read, or is no Python, uses none."""
    if len(text) > MAX_CHARACTERS:
        return frozenset()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # its verdict tells it
        return frozenset()
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return frozenset(name for name in names if name[0].isupper() and not name.isupper() and _is_class(tree, name))


def _is_class(tree: ast.Module, name: str) -> bool:
    def is_call(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and path_of(node.func) == name

    def names_it(node: ast.AST | None) -> bool:
        return node is not None and any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))

    holds = _flow(tree, is_call)

    def is_combined(node: ast.AST) -> bool:
        return isinstance(node, ast.BinOp | ast.AugAssign) and holds(node)

    combined = _flow(tree, is_combined)

    def are_objects(compared: list[ast.expr]) -> bool:
        texts = (one for one in compared if isinstance(one, ast.Call) and path_of(one.func) in ("str", "repr"))
        return any(map(combined, texts)) or sum(map(holds, compared)) > 1 and any(map(combined, compared))

    for node in ast.walk(tree):
        match node:
            case ast.Call() if is_call(node) and not node.args and not node.keywords:
                return True  # the result of a function without arguments is a constant
            case ast.Attribute(value=value, attr=attribute) if not attribute.startswith("__"):
                if path_of(value) == name or attribute not in OF_BUILTIN_TYPES and holds(value):
                    return True
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]) if names_it(kinds):
                return True
            case ast.ExceptHandler(type=kinds) if names_it(kinds):
                return True
            case ast.ClassDef(bases=bases) if any(map(names_it, bases)):
                return True
            case ast.Compare(left=left, comparators=others) if are_objects([left, *others]):
                return True
            case ast.Call(func=ast.Attribute(attr=method), args=[one, other, *_]) if method.startswith("assert"):
                if are_objects([one, other]):
                    return True
    return False


def _flow(tree: ast.Module, is_source: Rule) -> Rule:
    """Whether an expression has a source in it, or a variable or an attribute that holds one somewhere."""
    holders: set[str] = set()

    def holds(node: ast.AST) -> bool:
        return any(is_source(inner) or path_of(inner) in holders for inner in ast.walk(node))

    pairs: list[tuple[ast.expr, ast.AST]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs += [(target, value) for target in targets]
            case ast.AugAssign(target=target):
                pairs.append((target, node))
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                pairs.append((target, value))
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                pairs.append((target, value))
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                pairs.append((target, value))
    count = -1
    while count < len(holders):
        count = len(holders)
        for target, given in pairs:
            if holds(given):
                whole = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                holders.update(path for one in whole if (path := path_of(one)))
    return holds
