"""The tests of a row in the forms that data sets have, as what `code.verify` runs.

| form | who has it |
|---|---|
| a list of Python texts with asserts | HumanEval, MBPP, KodCode |
| a list of mappings with `input` and `output`, for a program that reads and prints | Codeforces, verl |
| the same with `testtype: functional` and `fn_name`; each line of `input`, and `output`, is JSON | LiveCodeBench |
| a mapping with the lists `inputs` and `outputs`, and maybe `fn_name` | APPS, TACO, verl |
| a mapping whose `input` and `output` are lists, with an item for each case | code_contests |
| one of these as a text of JSON | all of them |

Invariant (tests/unit/verifiers): what is in no such form is a fault that names it, and is never run as something else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

from megatron_rl.verifiers.sandbox.unfit_tests import fault_of_test
from megatron_rl.verifiers.truth import is_missing

Case = str | Mapping[str, str]
"""A Python text that calls the program's functions, or the `input` and the `output` of the program."""


class FunctionTest(str):
    """A Python text that calls one function, whose program may use usual modules without an import (`run_tests`): the
    graders of LeetCode and LiveCodeBench import them before the program."""


STANDARD = ("stdin", "stdin_stdout", "standard_input")
FUNCTIONAL = ("functional", "function_call", "call_based")
NAMES = ("fn_name", "func_name")
CALL = """
list_, tuple_, dict_, int_ = [].__class__, ().__class__, {{}}.__class__, (0).__class__
def key_(key):
    match key:
        case int_():
            return f"{{key}}"
    return key
def plain_(value):
    match value:
        case list_() | tuple_():
            return [plain_(item) for item in value]
        case dict_():
            return {{key_(key): plain_(value[key]) for key in value}}
    return value
try:
    tested_ = Solution().{name}
except (NameError, AttributeError):
    tested_ = {name}
expected_ = {expected}
"""
"""The beginning of a functional test: it finds the function, or the method of a class `Solution`, as the sites of these
tasks have it. For `plain_` a tuple is a list, and a whole number as a key is its text, as in JSON. The test uses no
builtin, because a program that is tested by a builtin's name could replace others."""
JUDGE = """given_ = tested_({arguments})
assert given_ in expected_ or plain_(given_) in expected_
"""
"""The rest of it: one way of giving the arguments."""


def cases_of(truth: Any) -> list[Case]:
    """The cases of a row's ground truth, at least one.

    Raises:
        ValueError: it is in none of the forms, or a Python text can judge no program.

    Example:
        >>> cases_of('{"inputs": ["1 2"], "outputs": ["3"]}')
        [{'input': '1 2', 'output': '3'}]
    """
    if isinstance(truth, str):
        try:
            read = json.loads(truth)
        except (ValueError, RecursionError):
            read = truth
        if is_missing(read):
            raise ValueError(f"the row has no ground truth: it is the text {truth.strip()!r}")
        # A text of JSON that is no form of tests, such as a number, is a Python text, which asserts nothing.
        truth = read if isinstance(read, list | Mapping) else [truth]
    if isinstance(truth, Mapping):
        truth = _of_mapping(truth)
    if not isinstance(truth, Sequence) or not truth:
        raise ValueError(f"they must be a list with at least one test, but they are {str(truth)[:100]!r}")
    kinds = {"text" if isinstance(case, str) else "mapping" for case in truth}
    if len(kinds) > 1:
        raise ValueError("they are partly Python texts and partly mappings")
    cases = [_case(case, f"case {number}") for number, case in enumerate(truth, 1)]
    if not any(isinstance(case, str) or case["output"].strip() for case in cases):
        raise ValueError("every `output` is empty, so a program that does nothing would pass; give one with text")
    return cases


def _of_mapping(truth: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The cases of a mapping: the items of its lists, or itself."""
    many = {"inputs", "outputs"} <= truth.keys()
    if not many and not ({"input", "output"} <= truth.keys() and _are_cases(truth)):
        return [truth]
    keys = ("inputs", "outputs") if many else ("input", "output")
    inputs, outputs = truth[keys[0]], truth[keys[1]]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"`{keys[0]}` and `{keys[1]}` must be lists of the same length")
    others = {key: value for key, value in truth.items() if key not in keys}
    return [{**others, "input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]


def _are_cases(truth: Mapping[str, Any]) -> bool:
    """Whether the lists `input` and `output` have an item for each case. For a function they may also be its arguments
    and its result; lists of different lengths can be nothing else."""
    if not (isinstance(truth["input"], list) and isinstance(truth["output"], list)):
        return False
    if not _function_of(truth):
        return True
    items = truth["input"]
    if len(items) == len(truth["output"]) and (len(items) > 1 or items and isinstance(items[0], str | list | Mapping)):
        raise ValueError("`input` and `output` may be one case or many; name them `inputs` and `outputs`")
    return False


def _function_of(case: Mapping[str, Any]) -> Any:
    """The function that a case calls; None if it is for a program that reads and prints."""
    metadata = case.get("metadata")
    named = {**metadata, **case} if isinstance(metadata, Mapping) else case
    return None if case.get("testtype") in STANDARD else next((named[key] for key in NAMES if named.get(key)), None)


def _case(case: Any, place: str) -> Case:
    if isinstance(case, str):
        if fault := fault_of_test(case):
            raise ValueError(f"{place}: {fault}")
        return case
    if not isinstance(case, Mapping) or not {"input", "output"} <= case.keys():
        has = f"it has {', '.join(map(str, case)) or 'nothing'}" if isinstance(case, Mapping) else "it has neither"
        raise ValueError(f"{place} must be a Python text, or have `input` and `output`; {has}")
    kind, name = case.get("testtype"), _function_of(case)
    if kind is not None and kind not in STANDARD + FUNCTIONAL:
        raise ValueError(f"{place} has the testtype {kind!r}, which is neither stdin nor functional")
    if kind in FUNCTIONAL and not name:
        raise ValueError(f"{place} is functional, and names no function; add `fn_name`")
    if name:
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"{place} has the fn_name {name!r}, which is no name of Python")
        return _call(name, case["input"], case["output"], place)
    return {key: _lines(case[key], f"the {key} of {place}") for key in ("input", "output")}


def _lines(value: Any, place: str) -> str:
    """A text, or the lines of one."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{place} must be a text, or a list of its lines, but it is {str(value)[:100]!r}")
    return value


def _call(name: str, given: Any, output: Any, place: str) -> FunctionTest:
    """The Python text that calls a function.

    Where the arguments are no text, the expected output may be the only item of a list, as in APPS, and a mapping in
    the place of a list has the arguments by their names, or else is the only one. Keys that are whole numbers as text
    may be numbers, because JSON has no such keys.
    """
    try:
        if isinstance(given, str):
            arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
            expected = [json.loads(output) if isinstance(output, str) else output]
        else:
            arguments = given if isinstance(given, list) else [given]
            expected = [output, output[0]] if isinstance(output, list) and len(output) == 1 else [output]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} calls {name}, and its input or output is no JSON: {error}") from error
    ways = [f"*{_literal(arguments, place)}"]
    if isinstance(given, Mapping) and given and all(isinstance(key, str) and key.isidentifier() for key in given):
        ways.insert(0, f"**{_literal(given, place)}")
    if (numbered := _with_numbers(arguments)) != arguments:
        ways.append(f"*{_literal(numbered, place)}")
    text = JUDGE.format(arguments=ways.pop())
    for way in reversed(ways):
        text = f"try:\n{indent(JUDGE.format(arguments=way), '    ')}except Exception:\n{indent(text, '    ')}"
    literal = _literal(tuple(_plain(one) for one in expected), place)
    return FunctionTest(CALL.format(name=name, expected=literal) + text)


def _with_numbers(value: Any) -> Any:
    """The value with numbers as the keys of each mapping whose keys are all whole numbers as text."""
    if isinstance(value, list | tuple):
        return [_with_numbers(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    are_numbers = all(isinstance(key, str) and re.fullmatch(r"0|-?[1-9]\d{0,17}", key, re.ASCII) for key in value)
    return {int(key) if are_numbers else key: _with_numbers(item) for key, item in value.items()}


def _plain(value: Any) -> Any:
    """What `plain_` of CALL makes of the value."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key) if isinstance(key, int) else key: _plain(item) for key, item in value.items()}
    return value


def _literal(value: Any, place: str) -> str:
    """The value as a Python text."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place} has the number {value}, which no test can compare")
    if isinstance(value, list | tuple):
        inner = "".join(f"{_literal(item, place)}, " for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, Mapping):
        return "{" + "".join(f"{_literal(k, place)}: {_literal(v, place)}, " for k, v in value.items()) + "}"
    return repr(value)
