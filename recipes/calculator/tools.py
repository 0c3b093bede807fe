"""The calculator that the model learns to call."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
MAX_CHARACTERS = 100
"""The length of an expression. It also bounds the size of the numbers, and the depth of the tree."""


async def calculator(expression: str) -> int:
    """Compute an expression of integers.

    Args:
        expression: integers with +, -, * and parentheses, such as 12*(3+4).
    """
    return computed(expression)  # it is asynchronous because this takes less time than a thread does to start


def computed(expression: str) -> int:
    """The value of an expression.

    Raises:
        ValueError: it is no expression of integers with these operators.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, and {MAX_CHARACTERS} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no expression: {error.msg}") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError(f"{ast.unparse(node)} is not allowed: only integers with +, -, * and parentheses")
