"""The forms in which data sets have their tests, and the tests of a row that cannot judge."""

from __future__ import annotations

import ast
import gc
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cover
import psutil
import pytest
from judged_programs import judge

from megatron_rl.types import Verdict
from megatron_rl.verifiers.sandbox.code import verify
from megatron_rl.verifiers.sandbox.process import Limits

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "humaneval.jsonl").open()]


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        (None, "they must be a list with at least one test, but they are 'None'"),
        ([], "they must be a list with at least one test"),
        (["assert f()", {"input": "", "output": ""}], "they are partly Python texts and partly mappings"),
        ([{"input": "1"}], "case 1 must be a Python text, or have `input` and `output`; it has input"),
        ([{"input": 1, "output": "2"}], "the input of case 1 must be a text, or a list of its lines, but it is '1'"),
        ([7], "case 1 must be a Python text, or have `input` and `output`; it has neither"),
        ('{"tests": ["assert f()"]}', "case 1 must be a Python text, or have `input` and `output`; it has tests"),
        ({"input": ["1", "2"], "output": ["1"]}, "`input` and `output` must be lists of the same length"),
        ({"input": [[1]], "output": [[1]], "fn_name": "f"}, "`input` and `output` may be one case or many"),
        ({"input": [], "output": []}, "they must be a list with at least one test, but they are '[]'"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "`inputs` and `outputs` must be lists of the same length"),
        ([{"input": "1\n", "output": " \n"}, {"input": "2\n", "output": ""}], "every `output` is empty, so a program"),
        ({"inputs": [], "outputs": []}, "they must be a list with at least one test, but they are '[]'"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "case 1 is functional, and names no function"),
        ([{"input": "1", "output": "2", "testtype": "graph"}], "case 1 has the testtype 'graph', which is neither"),
        ([{"input": "1", "output": "2", "fn_name": "f(); g"}], "case 1 has the fn_name 'f(); g', which is no name"),
        ([{"input": "1 2", "output": "2", "fn_name": "f"}], "case 1 calls f, and its input or output is no JSON"),
        ([{"input": "1", "output": "NaN", "fn_name": "f"}], "case 1 has the number nan, which no test can compare"),
    ],
)
def test_a_broken_row_is_an_abstention_that_names_its_fault(cases, message):
    verdict = judge("def f(): return 1", cases)
    assert verdict.score is None and verdict.failed and f"the row's tests are broken: {message}" in verdict.reason


def test_a_case_without_output_among_others_is_judged():
    assert (
        judge("print(input().strip('1'))", [{"input": "1", "output": ""}, {"input": "2", "output": "2"}]).score == 1.0
    )


ADDS = "def add(a, b): return a + b"


METHOD = "class Solution:\n    def add(self, a, b): return a + b"


PAIR = "def pair(a): return a, a"


READS = "print(sum(map(int, input().split())))"


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}, READS, "print(3)"),
        ({"inputs": [["1 2"]], "outputs": [["3"]], "fn_name": None}, READS, "print(4)"),
        ([{"input": "1 2", "output": "3", "testtype": "stdin", "fn_name": "add"}], READS, "print(4)"),
        ({"input": "1 2", "output": "3"}, READS, "print(4)"),
        ({"input": ["1 2\n", "3 4\n"], "output": ["3\n", "7\n"]}, READS, "print(3, 7)"),
        ({"input": [1, 2], "output": [3], "fn_name": "add"}, ADDS, "def add(a, b): return 4"),
        ({"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"}, ADDS, "def add(a, b): return 3"),
        ({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}, METHOD, METHOD.replace("a + b", "a - b")),
        (
            [{"input": "1\n2", "output": "3", "testtype": "functional", "fn_name": "add"}],
            METHOD,
            ADDS.replace("+", "*"),
        ),
        ([{"input": '"a"', "output": '["a", "a"]', "metadata": {"func_name": "pair"}}], PAIR, "def pair(a): return a"),
        (
            [{"input": '{"a": [1.5, null]}', "output": "[true]", "fn_name": "g"}],
            "def g(d): return ['a' in d]",
            "g = len",
        ),
        ({"inputs": [{"a": 1, "b": 2}], "outputs": [-1], "fn_name": "f"}, "def f(b, a): return a - b", "def f(a): 1"),
        ({"inputs": [{"a": 1}], "outputs": [1], "fn_name": "f"}, "def f(d): return d['a']", "def f(d): return 2"),
        (
            {"inputs": [[{"1": [{"2": 3}]}]], "outputs": [{"1": [[2, 3]]}], "fn_name": "f"},
            "def f(d): return {1: [(2, d[1][0][2])]}",
            "def f(d): return {1: {2, 3}, 2: 3}",
        ),
        ({"inputs": [[[1, 2]]], "outputs": [[3]], "fn_name": "sum"}, "def sum(x): return x[0] + x[1]", "sum = max"),
    ],
)
@pytest.mark.parametrize("as_text", cover.essential([False, True], False))
def test_the_forms_in_which_data_sets_have_their_tests(truth, right, wrong, as_text):
    given = json.dumps(truth) if as_text else truth
    assert judge(right, given) == Verdict(1.0)
    verdict = judge(wrong, given, "all")
    assert verdict.score == 0.0 and not verdict.failed


SURROUNDS = {
    "import io, contextlib as c\nwith c.redirect_stdout(io.StringIO()):\n    a = f(1)\nassert a == 2": (
        "redirect_stdout"
    ),
    "import random\nrandom.seed(5)\nassert f(1) == 2": "seed",
    "open('a.txt', 'w').write('x')\nassert f('a.txt') == 'x'": "open",
    "import logging\na = []\nh = logging.Handler()\nh.emit = a.append\nlogging.getLogger().addHandler(h)\nf(1)\n"
    "assert a": "addHandler",
    "import warnings\nwith warnings.catch_warnings(record=True) as w:\n    f(1)\nassert w": "catch_warnings",
}


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("class A: pass\nassert f(A()) == 1", "the test gives the program an object of type A"),
        (
            "class A: pass\nx = 1\ntry:\n    f(A())\nexcept BaseException:\n    pass\nassert x",
            "the test gives the program",
        ),
        ("assert 1 == 1", "it passes without using the program"),
        *((test, f"it uses {name}, but the program prints, reads and has") for test, name in SURROUNDS.items()),
    ],
)
def test_a_test_that_no_program_can_run_is_an_abstention(test, reason):
    verdict = judge("def f(x): return 1", [test])
    assert verdict.score is None and verdict.failed
    assert verdict.reason.startswith(f"a test of the row cannot be run: {reason}")


UNFIT = {
    "assert f(1) =": "'assert f(1) =' is no Python: SyntaxError: invalid syntax (test, line 1)",
    "return f(1)": "'return f(1)' is no Python: SyntaxError: 'return' outside function",
    "def test_f():\n    assert f(1) == 2": "it defines functions and calls none",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertTrue(f(1))": "it defines",
    "import unittest\nassert f(1)\nif __name__ == '__main__':\n    unittest.main()": "it calls unittest.main, which",
    "  ": "it asserts nothing",
    "f(1) == 2": "it asserts nothing, so every program would pass it; write `assert f(1) == 2`",
    "print(f(1))": "it asserts nothing",
    "x = f(1)": "it asserts nothing",
    "check_sum(1) == 2": "it asserts nothing",
    "f(1) == 2, 'wrong'": "it asserts nothing",
    "assert (f(1) == 2, 'wrong')": "its assert is a tuple, which is always true; write",
    "import numpy as np\nassert f(np.ones(3)) == 3": "it imports numpy, which programs and tests do not have",
    "def check(c):\n    from my_own import same\n    assert same(c(1), 2)\ncheck(f)": "it imports my_own",
    "from . import f\nassert f(1) == 2": "it imports ., which",
    "assert is_close(f(1), 2)": "it judges by is_close, which it neither defines nor imports",
    "assert f(1) is null": "it uses null, which is JSON; write None",
    "assert np.isclose(f(1), 2)": "it uses np, a package that programs and tests do not have",
    "import builtins\na = []\nbuiltins.print = a.append\nf(1)\nassert a": "it sets builtins.print, but",
    "import builtins\nbuiltins.input = lambda: 'x'\nassert f() == 'x'": "it sets builtins.input, but",
    "import os\nos.environ['A'] = 'x'\nassert f() == 'x'": "it sets os.environ, but",
    "import sys\nsys.argv = ['a', 'x']\nassert f() == 'x'": "it sets sys.argv, but",
    "import io, sys\nsys.stdin = io.StringIO('2')\nassert f(1) == 2": "it sets sys.stdin, but",
    "from unittest.mock import patch\nwith patch('builtins.input'):\n    assert f()": "it replaces builtins.input",
    "def test_f(capsys):\n    f()\n    assert capsys.readouterr().out\ntest_f(None)": "it needs capsys of pytest",
    "import io, contextlib as c\nwith c.redirect_stdout(io.StringIO()) as b:\n    f(1)\nassert b.getvalue()": (
        "it reads what the program prints by c.redirect_stdout, but the program runs in another process"
    ),
}
UNFIT |= {
    "import inspect\nassert len(inspect.signature(f).parameters) == 1": (
        "it looks at an object of the program by signature"
    ),
    "with f(1):\n    raise ValueError\nassert f(1)": (
        "it raises an error that an object of the program would have to end"
    ),
}


@pytest.mark.parametrize("test", UNFIT)
def test_a_test_that_reading_shows_to_judge_nothing_is_told_without_a_program(test):
    for verdict in (judge("def f(x): return 1", [test]), verify("", test, Limits(), "share")):
        assert verdict.score is None and verdict.failed
        assert verdict.reason.startswith(f"the row's tests are broken: case 1: {UNFIT[test]}"), verdict.reason


FIT = [
    "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
    "import unittest\nunittest.TestCase().assertEqual(f(1), 2)",
    "if f(1) != 2:\n    raise ValueError",
    "import sys\nif f(1) != 2: sys.exit(1)",
    "try:\n    import numpy\nexcept ImportError:\n    pass\nassert f(1) == 2",
    "from math import isclose\nassert isclose(f(1), 2)",
    "def is_close(a, b): return abs(a - b) < 1e-6\nassert is_close(f(1), 2)",
    "import random\nrandom.seed(1)\nn = random.randint(1, 9)\nassert f(n) == n + 1",
    "import io, contextlib as c\nwith c.redirect_stdout(io.StringIO()):\n    a = f(1)\nassert a == 2",
    "import inspect\ndef own(): pass\nassert not inspect.signature(own).parameters and f(1) == 2",
]


@pytest.mark.parametrize("test", cover.essential(FIT, *FIT[::2]))
def test_a_test_that_can_judge_is_kept(test):
    assert judge("def f(x): return x + 1", [test]) == Verdict(1.0)
    verdict = judge("def f(x): return 1", [test])
    assert verdict.score == 0.0 or "redirect_stdout" in verdict.reason


@pytest.mark.parametrize("truth", ["null", " NaN "])
def test_a_text_of_json_that_says_nothing_is_a_missing_truth(truth):
    verdict = judge("def f(x): return 1", truth)
    assert verdict.failed and f"the row has no ground truth: it is the text {truth.strip()!r}" in verdict.reason


EXPECTS_AN_ERROR = "try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    assert False"


@pytest.mark.parametrize(
    ("program", "test"),
    [("x = 1", EXPECTS_AN_ERROR), ("f = 3", EXPECTS_AN_ERROR), ("class f(Exception): pass", "assert f(7)")],
)
def test_a_program_without_the_tested_function_is_no_fault_of_the_row(program, test):
    verdict = judge(program, [test])
    assert verdict.score == 0.0 and not verdict.failed and "no function of the program" in verdict.reason
    assert judge("def f(n): return n if n > 0 else n.error", [test]) == Verdict(1.0)


def without_last_statement(program: str, function: str) -> str:
    tree = ast.parse(program)
    [*_, last] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    last.body = last.body[:-1] or [ast.Pass()]
    return ast.unparse(tree)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.deep
def test_humaneval_and_its_broken_solutions():
    """Four at a time from threads; no file descriptor and no process is left."""
    whole = [row["prompt"] + row["canonical_solution"] for row in ROWS]
    broken = [without_last_statement(program, row["entry_point"]) for program, row in zip(whole, ROWS, strict=True)]
    gc.collect()  # what earlier tests left open
    descriptors, processes = set(os.listdir("/proc/self/fd")), children()
    with ThreadPoolExecutor(4) as threads:
        scores = list(
            threads.map(
                lambda pair: judge(pair[0], pair[1]["ground_truth"]).score,
                [*zip(whole, ROWS, strict=True), *zip(broken, ROWS, strict=True)],
            )
        )
    assert scores == [1.0] * len(ROWS) + [0.0] * len(ROWS)
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert children() <= processes
