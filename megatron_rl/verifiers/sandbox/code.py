"""Scores a Python program by the unit tests of its row.

Invariants: the program is judged only by values that it returns or prints, outside its process (`program_tests.py`);
each test has the full limits for itself, as long as the time of the whole answer lasts, and what has not run by then
counts as not passed; a row whose tests are broken, and a sandbox that does not work, give an abstention and never the
score 0.

A program can still guess, because it sees the arguments of a test. Beyond that it can only profit from a weak test. A
test that compares two objects of the program's own classes asks the program's `__eq__`. A test that computes the
expected value from its arguments after the call (`f(x) == sorted(x)`) lets the program change them. A test that judges
by a name that only the program defines or imports (`isclose`) asks the program, so tests should import what they need.
If the tested function has the name of a builtin, other builtins can be replaced too.

Tests use the program's own objects with all operators, with `with` and with `await`, except: a value of the test is
compared by `==` alone, and equals none; it is an operand (`a * 2`), or an argument of `startswith`, `issubset` and
other methods that judge, only of an object that the test has made by a name like `Vector`, which it uses as a class: by
an attribute of an object, or by two objects (`classes.py`); `in` goes through the items, and never asks `__contains__`,
which would judge itself; no object ends an error in a `with`; what is awaited runs to its end, so that no time limit of
the test cuts it. A test that needs more fails, and is refused where reading it shows that. Third-party packages are not
available.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Literal

from megatron_rl.types import Verdict
from megatron_rl.verifiers.sandbox.code_tests import Case, FunctionTest, cases_of
from megatron_rl.verifiers.sandbox.process import Limits, SandboxError, run_idle, run_script, run_tests
from megatron_rl.verifiers.sandbox.unfit_tests import suspicion

FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)")
LABEL = re.compile(r"[{.\s]*([\w+#-]*)")
PYTHON = re.compile(r"(python|py|ipython)[\d.]*", re.IGNORECASE)
OTHERS = frozenset(
    "bash c c# c++ cmd console cpp cs csharp css csv diff dockerfile go haskell html ini java javascript js json julia"
    " kotlin latex log makefile markdown matlab md mermaid none output perl php plain plaintext powershell r ruby rust"
    " scala sh shell sql stderr stdin stdout swift tex text toml ts txt typescript xml yaml yml zsh".split()
)
"""Labels of blocks that are surely no program in Python."""

Score = Literal["share", "all"] | float


def verify(text: str, truth: Any, limits: Limits, score: Score, within_s: float = math.inf) -> Verdict:
    """The verdict on the program in an answer (`last_block`).

    Args:
        text: the part of the answer after the thought.
        truth: the tests, in a form of `code_tests`: Python texts whose asserts call the program's functions, such as
            HumanEval's `check` followed by a call of it with the entry point; or mappings with the `input` that the
            program reads and the `output` that it must print. Outputs are compared token by token: `1.0` is not `1`,
            and white space only separates.
        limits: of each process. A test that another one slowed down or ended is run again, alone.
        score: `share` gives the share of the passed cases, `all` gives 1 if all pass, and a number gives 1 if at least
            this share passes.
        within_s: the time that all tests share. The verdict comes at most one start of a process later.

    Raises:
        ValueError: `score` is none of these.
    """
    if score not in ("share", "all") and not (isinstance(score, float | int) and 0 < score <= 1):
        raise ValueError(f"score must be `share`, `all` or a share above 0 and up to 1, but it is {score!r}")
    try:
        cases = cases_of(truth)
    except ValueError as error:
        return Verdict(None, f"the row's tests are broken: {error}", failed=True)
    program = last_block(text)
    if program is None:
        return Verdict(0.0, "no fenced block of Python")
    required = None if score == "share" else 1.0 if score == "all" else float(score)
    num_passed, num_failed, first_reason = 0, 0, ""
    try:
        for passed, reason in outcomes(program, cases, limits, within_s):
            num_passed += passed
            num_failed += not passed
            first_reason = first_reason or reason and f"case {num_passed + num_failed} of {len(cases)}: {reason}"
            if required is not None and num_passed / len(cases) >= required:
                return Verdict(1.0, first_reason)
            if required is not None and (len(cases) - num_failed) / len(cases) < required:
                return Verdict(0.0, first_reason)
    except (SandboxError, BrokenCase) as error:
        return Verdict(None, str(error), failed=True)
    except OSError as error:  # no memory, no file descriptor or no disk for the sandbox itself
        return Verdict(None, f"the sandbox could not be set up: {error}", failed=True)
    return Verdict(num_passed / len(cases), first_reason)


def idle(truths: Sequence[Any], within_s: float) -> tuple[int, list[str]]:
    """Rows whose tests pass for functions that do nothing: the number of rows tried, and for each row
    found what these functions return and how its first test begins.

    Args:
        truths: ground truths that `cases_of` reads without a fault. A program that reads and prints is not tried.
        within_s: the time for all.

    Raises:
        SandboxError: the sandbox does not work.
    """
    rows = [[case for case in cases_of(truth) if isinstance(case, str)] for truth in truths]
    rows = [tests for tests in rows if tests]
    results = run_idle(rows, Limits(wall_s=within_s)) if rows else []
    found = [(tests[0], result) for tests, result in zip(rows, results, strict=False) if result]
    return len(results), [f"{result}, as in {test.strip()[:80]!r}" for test, result in found]


class BrokenCase(ValueError):
    """A test cannot be run on any program."""


def last_block(text: str) -> str | None:
    """The program in a Markdown text; None if there is none: the last fenced block that is labelled as Python, or else
    the last one whose label does not say something else. A block goes up to the end of the text if it is not closed,
    and one without a line of code is none, nor is a session with the prompts `>>>`, which shows a use of the program.

    As in CommonMark, a fence has three or more backticks or tildes, and one of at least as many closes it. The
    indentation of the fence is taken from the lines. In a list item it may be deep.
    """
    blocks: list[tuple[bool, list[str]]] = []
    block: list[str] = []
    fence, indent = "", 0
    for line in text.replace("\r\n", "\n").split("\n"):
        match = FENCE.fullmatch(line)
        if fence and match and match[2].startswith(fence) and len(match[1]) <= indent + 3 and not match[3].strip():
            fence = ""
        elif fence:
            block.append(line[min(indent, len(line) - len(line.lstrip(" "))) :])
        elif match and not (match[2][0] == "`" and "`" in match[3]):
            fence, indent, block = match[2], len(match[1]), []
            label = LABEL.match(match[3])[1]  # type: ignore[index]  # it matches any text
            if label.lower() not in OTHERS:
                blocks.append((bool(PYTHON.fullmatch(label)), block))
    programs = [(is_python, block) for is_python, block in blocks if _is_program(block)]
    return "\n".join(max(reversed(programs), key=itemgetter(0))[1]) + "\n" if programs else None


def _is_program(block: list[str]) -> bool:
    """Whether the first line that is no comment is there, and is no input of a session."""
    code = (line.strip() for line in block)
    first = next((line for line in code if line and not line.startswith("#")), "")
    return bool(first) and not first.startswith(">>>")


def outcomes(
    program: str, cases: Sequence[Case], limits: Limits, within_s: float = math.inf
) -> Iterator[tuple[bool, str]]:
    """Whether each case passed, and why not.

    Raises:
        BrokenCase: a test cannot be run on any program.
        SandboxError: the sandbox does not work.
    """
    deadline = time.monotonic() + within_s
    too_late = False, f"the cases before it took the {within_s:g} s that all of them share"
    tests = [case for case in cases if isinstance(case, str)]
    pairs = [case for case in cases if isinstance(case, Mapping)]
    for pair in pairs:
        if (rest_s := deadline - time.monotonic()) <= 0:
            yield too_late
            continue
        ended = run_script(program, pair["input"], replace(limits, wall_s=min(limits.wall_s, rest_s)))
        same = ended.output.split() == pair["output"].encode(errors="replace").split()
        yield not ended.reason and same, ended.reason or ("" if same else "other output")
    while tests:
        if (rest_s := deadline - time.monotonic()) <= 0:
            yield from [too_late] * len(tests)
            return
        is_call = isinstance(tests[0], FunctionTest)
        run = run_tests(program, tests, replace(limits, wall_s=min(limits.wall_s, rest_s)), imports=is_call)
        for test, (verdict, reason) in zip(tests, run.verdicts, strict=False):
            if verdict == "raised" and (doubt := suspicion(test)):
                raise BrokenCase(f"a test of the row cannot be run: {doubt}: {reason}")
            if verdict == "broken":
                raise BrokenCase(f"a test of the row cannot be run: {reason}")
            yield verdict == "passed", reason
        # Only a test that had its processes for itself is to blame if these end.
        if run.cut and not run.verdicts:
            yield False, run.cut
        tests = tests[max(1, len(run.verdicts)) :]
