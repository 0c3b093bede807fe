"""The value of an arithmetic expression of the shell, in integers."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

MOST_VARIABLES = 20
"""Variables that refer to each other; more of them are a circle."""


def number(text: str, text_of: Callable[[str], str], depth: int = 0) -> int:
    """The value of `text`.

    Args:
        text_of: gives the text of a variable.

    Raises:
        SyntaxError, TypeError: a form that is not read here.
        KeyError: a variable has no value.
        ZeroDivisionError: as it says.
        RecursionError: variables refer to each other in a circle.
    """
    if depth > MOST_VARIABLES:
        raise RecursionError(text)
    signs = re.findall(r"#|\?|\*\*|!(?!=)|[<>=]=?|-", text)
    if {"#", "?"} & set(signs) or ("**" in signs and "-" in signs) or ("!" in signs and len(set(signs)) > 1):
        raise SyntaxError(f"{text}: Python reads it in another way than the shell")
    written = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    tree = ast.parse(written.strip() or "0", mode="eval").body

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return int(node.value)
        if isinstance(node, ast.Name):
            return number(text_of(node.id), text_of, depth + 1)
        if isinstance(node, ast.BoolOp):
            parts = [bool(value(one)) for one in node.values]
            return int(all(parts) if isinstance(node.op, ast.And) else any(parts))
        if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
            return BINARY[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
            return UNARY[type(node.op)](value(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
            return int(COMPARED[type(node.ops[0])](value(node.left), value(node.comparators[0])))
        raise TypeError(ast.dump(node))

    return value(tree)


def _divide(left: int, right: int) -> int:
    """As C divides: towards zero."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: lambda left, right: left - right * _divide(left, right),
    ast.Pow: operator.pow,
}
COMPARED: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
UNARY: dict[type, Callable[[int], int]] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
