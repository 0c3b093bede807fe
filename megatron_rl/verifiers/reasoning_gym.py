"""The reasoning_gym reward: the answer to a task of the library reasoning-gym (Stojanovski et al. 2025,
arXiv:2505.24760) is scored by the task's own scorer. `megatron-rl reasoning-gym-rows` writes the rows.

Some scorers evaluate the answer as Python, directly or with sympy's `parse_expr`. An answer may be hostile, and a score
that its code could change would be worth nothing. `library` replaces these evaluations: values are read as literals,
and formulas must consist of numbers, operators, symbols and elementary functions. Other texts score what the library
gives for a text that it cannot parse.

Invariants (tests/unit/verifiers): no answer runs as code; a score is what the library gives, between 0 and 1; another
score, or an exception of the scorer that the row causes, is a failed verdict, never a score; a row scores the same
before and after JSON.
"""

from __future__ import annotations

import ast
import builtins
import json
import keyword
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron_rl.types import Verdict

REFUSED = {
    "coin_flip": "its scorer gives 1 to the answer 0 wherever the right one begins with 0",
    "complex_arithmetic": "its scorer gives 1 to the answer nan",
    "composite": "it is a mixture; name its tasks one by one",
    "game_of_life_halting": "its scorer gives 1 to every answer that is not empty",
}
"""The tasks that have no rows, with the reason. A constant answer that is always right would be learnt soon."""

TRUTH = {"task": str, "answer": str | None, "metadata": dict, "config": dict}
"""The form of a row's ground truth: the task's name; the library's own answer, None where a task has none; what the
scorer knows about the row; and those settings of the task that are not the library's own."""

_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_TUPLES = {"arc_agi": "output", "rearc": "output"}
"""The metadata that a scorer compares with a tuple of tuples, which JSON makes a list of lists."""


def verify(text: str, truth: Any) -> Verdict:
    """The verdict on the text after the thought.

    A scorer that raises on an answer, but not on the row's own one, cannot read the answer, which scores 0: an
    abstention would let a policy escape the score 0 with nonsense. Otherwise the error is raised here, and the worker's
    process makes it a failed verdict.
    """
    if fault := fault_of(truth):
        return Verdict(None, fault, failed=True)
    task, metadata = truth["task"], truth["metadata"]
    if name := _TUPLES.get(task):
        metadata = metadata | {name: tuple(map(tuple, metadata[name]))}
    scorer, entry = _scorer(task, json.dumps(truth["config"])), {"answer": truth["answer"], "metadata": metadata}
    answer = final_answer(text)
    if task == "puzzle24" and sorted(re.findall(r"\d+", answer)) != sorted(map(str, metadata["numbers"])):
        return Verdict(0.01)  # as for any wrong answer: the scorer would take any four numbers that make 24
    try:
        score = scorer(answer, entry)
    except Exception as error:  # of any class, from any of a hundred tasks
        readable = "[]" if truth["answer"] is None else truth["answer"]
        if answer == readable:
            raise
        scorer(readable, entry)
        return Verdict(0.0, f"the scorer of {task} cannot read the answer: {type(error).__name__}")
    if not (isinstance(score, Real) and 0 <= float(score) <= 1):
        return Verdict(None, f"the scorer of {task} gave {score!r}, which is no number from 0 to 1", failed=True)
    return Verdict(float(score))


def final_answer(text: str) -> str:
    """What stands in the last `<answer>...</answer>`, or else the whole text, without white space at its ends."""
    found = _ANSWER.findall(text)
    return (found[-1] if found else text).strip()


def fault_of(truth: Any) -> str | None:
    """Why no answer could be compared with this ground truth, as far as this is known without the library."""
    if isinstance(truth, Mapping) and all(isinstance(truth.get(key, ...), kind) for key, kind in TRUTH.items()):
        return None
    needs = f"a `ground_truth` that is a mapping with {', '.join(TRUTH)}, as `megatron-rl reasoning-gym-rows` writes it"
    return f"the reasoning_gym reward needs {needs}, but it is {truth!r}"


def missing_package() -> str | None:
    """How to install the library; None if it is there. It is not imported."""
    spec = find_spec("reasoning_gym")
    if spec is not None and spec.origin is not None:  # a folder with this name, which is no package, has no origin
        return None
    return "the library reasoning-gym is not installed; install it with `pip install 'megatron-rl[reasoning-gym]'`"


@cache
def _scorer(task: str, config: str) -> Callable[[str, dict[str, Any]], Any]:
    scorer: Callable[[str, dict[str, Any]], Any] = library().create_dataset(task, **json.loads(config)).score_answer
    return scorer


@cache
def library() -> ModuleType:
    """The package, patched so that no scorer evaluates an answer. The import takes two seconds, because it imports all
    tasks."""
    import reasoning_gym
    import sympy

    sympy_here = SimpleNamespace(**vars(sympy) | {"parse_expr": partial(_parsed, sympy.parse_expr)})
    replaced: dict[str, dict[str, Any]] = {
        "arithmetic.bitwise_arithmetic": {"eval": _bitwise},
        "algorithmic.binary_matrix": {"eval": ast.literal_eval},
        "algorithmic.number_sorting": {"eval": ast.literal_eval},
        "algorithmic.spiral_matrix": {"eval": ast.literal_eval},
        "algorithmic.string_insertion": {"eval": ast.literal_eval},
        "algebra.intermediate_integration": {"sympy": sympy_here},
        "algebra.polynomial_multiplication": {"sp": sympy_here},
        "algebra.simple_integration": {"sympy": sympy_here},
        "games.countdown": {"parse_expr": sympy_here.parse_expr},
        "games.n_queens": {"eval": ast.literal_eval},
        "games.puzzle24": {"parse_expr": sympy_here.parse_expr},
    }
    for name, values in replaced.items():
        vars(import_module(f"reasoning_gym.{name}")).update(values)
    library: ModuleType = reasoning_gym
    return library


def _bitwise(text: str) -> Any:
    """The value of the expression in a row of bitwise_arithmetic.

    Raises:
        ValueError: the text has more than hexadecimal numbers and operators.
    """
    if not re.fullmatch(r"(?:0x[0-9a-f]++|[-+*&|^~<>()0-9\s])*", text):
        raise ValueError(f"{text!r} is no expression of hexadecimal numbers")
    return eval(text, {})


_FUNCTIONS = frozenset(
    "Abs E I acos acosh acot acoth acsc asec asin asinh atan atanh cbrt cos cosh cot coth csc csch erf exp factorial "
    "log ln pi sec sech sign sin sinh sqrt tan tanh".split()
)


def _parsed(parse: Callable[..., Any], text: str, **options: Any) -> Any:
    """sympy's expression of a formula. `parse_expr` evaluates the text as Python, with all names of sympy and Python.

    Raises:
        ValueError: the text has other characters than a formula, or takes an attribute, or has a name that means more
            than a symbol or an elementary function.
    """
    import sympy

    def is_harmless(name: str) -> bool:
        known = hasattr(sympy, name) or hasattr(builtins, name) or keyword.iskeyword(name)
        return name in _FUNCTIONS or not known

    if not re.fullmatch(r"[A-Za-z0-9\s.,+*/^()!%-]*", text) or re.search(r"\.\s*[A-Za-z]", text):
        raise ValueError(f"{text!r} is no formula")
    if not all(map(is_harmless, re.findall(r"[A-Za-z][A-Za-z0-9]*", text))):
        raise ValueError(f"{text!r} has a name that is neither a symbol nor an elementary function")
    with suppress(SyntaxError, MemoryError, RecursionError):  # the parser below reads more than Python does
        if (bits := _bits(ast.parse(text.strip(), mode="eval").body)) > MOST_BITS:
            raise ValueError(f"{text!r} has a number of {bits:g} bits")
    return parse(text, **options)


MOST_BITS = 10_000
"""The largest size of a number in an answer. Python would compute `9**9**9` for longer than an answer may take."""


def _bits(node: ast.AST) -> float:
    """About as many bits as the value of an expression can have, which it would take to compute it exactly."""
    inner = [_bits(one) for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
    if isinstance(node, ast.Constant):
        return float(node.value.bit_length()) if isinstance(node.value, int) else 1024.0
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return inner[0] * _power_of_2(inner[1])
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("cosh", "exp", "factorial", "sinh")
    ):
        return _power_of_2(max(inner))
    return sum(inner) or 1.0


def _power_of_2(exponent: float) -> float:
    return 2.0**exponent if exponent < 1000 else math.inf
