"""Whether two sympy expressions are equivalent: Math-Verify's rules, and values at a point.

Math-Verify tries several comparisons one after another, and an error in one of them only means that it found no
equality. Its own functions for whole texts also turn the errors of the parser into False, so they are not used.
"""

from __future__ import annotations

from typing import Any

import sympy
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify.grader import sympy_expr_eq
from sympy.core.relational import Relational

from megatron_rl.verifiers.mathematics.formula import UNEVALUATED, has, nodes


def refuse_unsolvable(expected: Any) -> None:
    """Raises what sympy raises if it cannot solve the inequalities of a ground truth: no answer could be compared."""
    if isinstance(expected, Relational | And | FiniteSet):
        _solutions(expected)


def same_expression(expected: Any, found: Any) -> bool:
    """Whether two expressions are equivalent, by Math-Verify's rules and a few more. May raise what sympy raises."""
    if (
        _is_inequality(expected)
        and isinstance(found, sympy.Set)
        or _is_inequality(found)
        and isinstance(expected, sympy.Set)
    ):
        return _same_numbers(expected, found)
    if _same_where_roots_are_real(expected, found):
        return True
    return not _differ_at_a_point(expected, found) and _same_by_math_verify(expected, found)


def _is_inequality(expression: Any) -> bool:
    return isinstance(expression, Relational | And) and not isinstance(expression, sympy.Eq)


def _same_numbers(a: Any, b: Any) -> bool:
    """Whether a set of numbers is what an inequality of one variable leaves. Math-Verify takes every true relation for
    the empty set, also one without a variable."""
    sets = _solutions(a), _solutions(b)
    if None in sets or sympy.EmptySet in sets:  # sympy takes the empty set for equal to a set of all there is
        return bool(sets[0] == sets[1] == sympy.EmptySet)
    return bool(sets[0] == sets[1] or sympy_expr_eq(*sets, 6, 15))


def _same_by_math_verify(expected: Any, found: Any) -> bool:
    """What `_same_expression` says about expressions whose values do not tell them apart."""
    if isinstance(expected, sympy.Ne) and isinstance(found, Relational):  # Math-Verify raises for this relation
        if not isinstance(found, sympy.Ne):
            return False
        expected, found = sympy.Eq(*expected.args, evaluate=False), sympy.Eq(*found.args, evaluate=False)
    if sympy_expr_eq(expected, found, 6, 15, allow_set_relation_comp=True):
        if _have_other_values(expected, found):
            return False
        # Math-Verify takes all equations without real solutions for equal.
        both_equations = isinstance(expected, sympy.Eq) and isinstance(found, sympy.Eq)
        return not both_equations or _multiples(expected, found) or bool(sympy.solve(expected))
    if has(expected, (sympy.log,)) and isinstance(expected, sympy.Expr) and isinstance(found, sympy.Expr):
        difference = sympy.expand_log(expected - found, force=True)  # ln(ab) is ln a + ln b: a and b are then positive
        if sympy.simplify(difference) == 0:
            return True
    sets = _solutions(expected), _solutions(found)
    if expected.free_symbols == found.free_symbols or isinstance(expected, sympy.Set) or isinstance(found, sympy.Set):
        return bool(None not in sets and sets != (expected, found) and sympy_expr_eq(*sets, 6, 15))
    return False


def _multiples(a: sympy.Eq, b: sympy.Eq) -> bool:
    """Whether one equation is the other one times a number, as 2x = 4 is x = 2 times 2."""
    ratio = sympy.simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def _solutions(expression: Any) -> Any:
    """The real numbers that satisfy inequalities of one variable; a set itself; None for anything else.

    x > 1, x < -1 is a union, because Math-Verify reads `or` as a comma, and an intersection would be one chain.
    """
    if isinstance(expression, FiniteSet) and len(expression.free_symbols) == 1:
        parts = [_solutions(part) for part in expression.args if isinstance(part, Relational | And)]
        return sympy.Union(*parts) if len(parts) == len(expression.args) and None not in parts else expression
    if isinstance(expression, Relational | And) and not isinstance(expression, sympy.Eq):
        if len(expression.free_symbols) != 1:
            return None
        found = expression.as_set()
        return sympy.Reals if found == sympy.UniversalSet else found
    return expression if isinstance(expression, sympy.Set) else None


def _differ_at_a_point(a: Any, b: Any) -> bool:
    """Whether two expressions have different values where their variables are 1/2 + 1/7, 1/2 + 2/7, ...

    This saves the time that sympy would need to simplify a difference that is not 0. It decides nothing if a value
    is not finite, or if the difference could be rounding. It also keeps apart what Math-Verify would round to 0,
    however small the values are.
    """
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if symbols and (a.is_Symbol or b.is_Symbol):  # Math-Verify compares abc with the product of a, b and c
        return False
    point = {symbol: sympy.Rational(1, 2) + sympy.Rational(n, 7) for n, symbol in enumerate(symbols, 1)}
    value, other = a.evalf(30, subs=point), b.evalf(30, subs=point)
    if not (value.is_number and other.is_number and value.is_finite and other.is_finite):
        return False
    difference = abs(value - other).evalf(30)
    if a.has(sympy.Float) or b.has(sympy.Float):  # decimals may be rounded to six digits
        return bool(difference > 1e-5 * min(1, abs(value)))
    if has(a, UNEVALUATED) or has(b, UNEVALUATED):  # found by quadrature
        return bool(difference > max(1e-10 * max(abs(value), abs(other)), 1e-25))
    # sympy evaluates a difference with more and more digits, and marks by a precision of one bit what may be 0.
    parts = (a - b).evalf(5, subs=point).as_real_imag()
    return any(part.is_Float and part and part._prec > 1 for part in parts)


def _values(expression: Any) -> list[Any]:
    """The formulas that a list, a set, an interval, a matrix, or relations like x = 5 and 0 < x consist of."""
    if isinstance(expression, Relational):
        sides = expression.args if expression.lhs.is_Symbol or expression.rhs.is_Symbol else ()
        return [side for side in sides if not side.is_Symbol]
    if isinstance(expression, sympy.Interval):
        return [expression.start, expression.end]
    if isinstance(expression, sympy.MatrixBase):
        return list(expression.flat())
    if isinstance(expression, sympy.Tuple | sympy.Set | And):
        return [value for part in expression.args for value in _values(part)]
    return [expression] if isinstance(expression, sympy.Expr) else []


def _have_other_values(a: Any, b: Any) -> bool:
    """Whether a value of the one expression is none of the other's. Math-Verify rounds to six decimals."""
    ours, theirs = _values(a), _values(b)
    return bool(ours and theirs) and any(
        all(_differ_at_a_point(value, other) for other in others)
        for values, others in ((ours, theirs), (theirs, ours))
        for value in values
    )


def _same_where_roots_are_real(a: Any, b: Any) -> bool:
    r"""Whether two expressions are equal where each factor under a root, or to a power with variables, is positive, so
    that \sqrt{2/k} is \sqrt{2} / \sqrt{k}, and (ab)^n is a^n b^n. A factor to an even power may have any sign:
    \sqrt{x^2} is not x."""
    if not all(isinstance(one, sympy.Expr | sympy.Tuple | sympy.Eq) for one in (a, b)):
        return False
    if isinstance(a, sympy.Tuple) != isinstance(b, sympy.Tuple):
        return False
    if isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq) and a.lhs != b.lhs:
        return False
    roots = [
        part.base
        for part in (*nodes(a), *nodes(b))
        if isinstance(part, sympy.Pow) and not part.exp.is_Integer and (part.exp.is_Rational or part.exp.free_symbols)
    ]
    factors = {
        factor
        for base in roots
        for factor, exponent in base.as_powers_dict().items()
        if factor.free_symbols and exponent.is_odd
    }
    if not factors:
        return False
    for signs in ({f for f in factors if f.is_Symbol}, factors):
        positive = {factor: sympy.Dummy(positive=True) for factor in signs}
        ours, theirs = ([value.xreplace(positive).doit() for value in _values(one)] for one in (a, b))
        if len(ours) == len(theirs) > 0 and all(
            not _differ_at_a_point(x, y) and sympy.simplify(x - y) == 0 for x, y in zip(ours, theirs, strict=True)
        ):
            return True
    return False
