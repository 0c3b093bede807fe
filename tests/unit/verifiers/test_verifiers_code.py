"""What a program must do to pass its tests: solve the task."""

from __future__ import annotations

import ast
import gc
import json
import math
import os
import sys
import tempfile
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from importlib import import_module
from pathlib import Path, PurePosixPath
from textwrap import dedent
from time import monotonic
from uuid import UUID

import cover
import psutil
import pytest
from hostile import FORGED_TEST, FORGERIES
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import deadline

from megatron_rl.types import Verdict
from megatron_rl.verifiers.sandbox import process as sandbox
from megatron_rl.verifiers.sandbox.code import last_block, verify
from megatron_rl.verifiers.sandbox.messages import STANDARD, VIEWS, decode, encode
from megatron_rl.verifiers.sandbox.process import Limits
from megatron_rl.verifiers.sandbox.script import IMPORTED

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "humaneval.jsonl").open()]


def judge(program: str, cases, score="share", **limits) -> Verdict:
    return verify(f"It is\n```python\n{dedent(program)}\n```\n", cases, Limits(**limits), score)


# --- the program in the answer ---


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("x = 1", None),
        ("", None),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```\nand\n```py\nx = 2\n```\nend", "x = 2\n"),
        ("```python\nx = 1\n```\nand\n```python\nx = 2", "x = 2\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("~~~\n```\n~~~", "```\n"),
        ("```python\n    x\n\n", "    x\n\n\n"),
        ("1. it\n    ```python\n    def f():\n        x\n  y\n    ```\n", "def f():\n    x\ny\n"),
        ('```python\ndef f():\n    """\n    ```\n    """\n```', 'def f():\n    """\n    ```\n    """\n'),
        ("```\r\ns = '\u2028\x0c'\r\n```\r\n", "s = '\u2028\x0c'\n"),
        ("   ```python\nx\n   ``` ", "x\n"),
        ("the words ```x``` are no block", None),
        ("```x``` are no block\n```\ny\n```", "y\n"),
        ("```python\ns = '```x'\n``` no end\n```", "s = '```x'\n``` no end\n"),
        ("```python\nx = 1\n```\nOutput:\n```text\n2\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython a.py\n```", "x = 1\n"),
        ("```Python3\nx = 1\n```\nIt prints\n```\n2\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\n \n```\n```\n```", "x = 1\n"),
        ("```solution\nx = 1\n```", "x = 1\n"),
        ("```{.python title='a.py'}\nx = 1\n```\n```python\nx = 2\n```", "x = 2\n"),
        ("```\nx = 1\n```\n```JSON\n{}\n```", "x = 1\n"),
        ("```c++\nint x;\n```", None),
        ("```python\n```", None),
        ("```python\nx = 1\n```\nUse it:\n```python\n>>> f(1)\n2\n```\n```py\n# 2\n```", "x = 1\n"),
        ('```python\n"""\n>>> f(1)\n"""\n```', '"""\n>>> f(1)\n"""\n'),
        ("```\nx = 1\n```\n```pycon\n# A use:\n>>> f(1)\n```", "x = 1\n"),
    ],
)
def test_the_program_is_the_last_block_that_may_be_one(text, block):
    assert last_block(text) == block


def test_an_answer_without_a_block_scores_0():
    assert verify("def f(): return 1", ["assert f() == 1"], Limits(), "all") == Verdict(
        0.0, "no fenced block of Python"
    )


# --- rows ---


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


def test_a_functional_program_may_use_what_leetcode_imports():
    program = (
        "def cache(f): return f\nclass Solution:\n    @cache\n"
        "    def f(self, a: List[int]) -> Optional[int]:\n"
        "        q = deque(a)\n        return math.gcd(*q) + gcd(*a) + bisect.bisect_left([1], 2) + sqrt(1)\n"
        "def sqrt(x): return 5\n"
    )
    assert judge(program, {"inputs": [[[4, 6]]], "outputs": [10], "fn_name": "f"}) == Verdict(1.0)
    verdict = judge("def f(a): return gcd(*a)", ["assert f([4, 6]) == 2"])
    assert verdict.score == 0.0 and "name 'gcd' is not defined" in verdict.reason


def test_all_that_is_imported_exists():
    for module, names in IMPORTED.items():
        for name in names.split():
            assert hasattr(import_module(module), name) or name == "batched", (module, name)  # since Python 3.12


LARGE = 7**6000


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("n = 0\nif n == 0:\n    print(0)\n    exit()\nprint(1)", "0"),
        ("print(1)\nquit(0)", "1"),
        ("print(len(str(7 ** 6000)), hex(7 ** 6000))", f"{int(6000 * math.log10(7)) + 1} {LARGE:#x}"),
    ],
)
def test_a_program_may_call_exit_and_print_large_numbers(program, output):
    assert judge(program, [{"input": "", "output": output}]) == Verdict(1.0)


def test_a_program_may_open_its_streams_by_their_paths():
    program = "import sys\nfrom pathlib import Path\nsys.stdin = open('/dev/stdin')\na = input()\n" + (
        "b = Path('/dev/stdin').read_text()\nprint(a, b, sep='', end='', file=open('/dev/stdout', 'w', buffering=1))"
    )
    assert judge(program, [{"input": "1\n", "output": "1"}]) == Verdict(1.0)


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


@pytest.mark.parametrize("end", ["quit()", "import sys\nsys.exit(0)", "raise SystemExit"])
def test_what_a_program_defines_before_it_exits_is_judged(end):
    cases = ["assert f(1) == 2", "assert g(1) == 2"]
    verdict = judge(f"def f(x): return x + 1\n{end}\ndef g(x): return x + 1", cases)
    assert verdict == Verdict(0.5, "case 2 of 2: line 1 of the test: NameError: name 'g' is not defined")


@pytest.mark.parametrize("score", [0.0, 1.5, "most", None, math.nan])
def test_a_wrong_score_is_named(score):
    with pytest.raises(ValueError, match="`share`, `all`.*above 0"):
        judge("x = 1", ["assert x == 1"], score)


def test_a_sandbox_that_does_not_work_is_an_abstention(monkeypatch, tmp_path):
    sandbox.isolation()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
        verdict = judge("def f(): return 1", ["assert f() == 1"])
        assert verdict.score is None and verdict.failed and "the sandbox could not be set up: " in verdict.reason
    monkeypatch.setattr(sandbox, "COMMAND", (sys.executable, "-c", ""))
    for case in ("assert f() == 1", {"input": "", "output": "1"}):
        verdict = judge("def f(): return 1", [case])
        assert verdict.score is None and verdict.failed and "could not be confined" in verdict.reason


# --- scores ---


@pytest.mark.parametrize(
    ("score", "expected"), [("share", 0.5), ("all", 0.0), (0.5, 1.0), (0.51, 0.0), (0.25, 1.0), (1, 0.0)]
)
def test_the_score_of_a_program_that_passes_two_of_four(score, expected):
    cases = [f"assert f({n}) == {n}" for n in (1, 2, 3, 4)]
    verdict = judge("def f(n): return n if n in (2, 3) else 0", cases, score)
    assert verdict == Verdict(expected, "case 1 of 4: line 1 of the test: AssertionError")


def test_a_test_that_ends_the_process_costs_itself_alone():
    program = """
        import os
        num_calls = 0
        def f(n):
            global num_calls
            num_calls += 1
            if n in (2, 5) or num_calls > 3: os._exit(0)
            return n
    """
    cases = [f"assert f({n}) == {n}" for n in (1, 2, 3, 4, 5, 6, 7)]
    assert judge(program, cases).score == 5 / 7
    assert judge("import os\nos._exit(1)", cases).reason.startswith("case 1 of 7: exit status 1")


@pytest.mark.parametrize(
    "end",
    [
        "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n        while True: pass",
        "resource.prlimit(0, resource.RLIMIT_CPU, (1, 1))\n        while True: pass",
        "after_a_moment(signal.SIGKILL)",
        "after_a_moment(40)",
    ],
)
def test_what_a_program_does_to_itself_costs_its_own_test(end):
    """It is no abstention, with which a model could hide an answer."""
    program = f"""
    import ctypes, resource, signal, threading
    def after_a_moment(number):
        libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
        event, moment = (ctypes.c_int * 16)(0, 0, number), (ctypes.c_long * 4)(0, 0, 0, 1)
        assert libc.timer_create(1, event, ctypes.byref(timer)) == 0
        libc.timer_settime(timer, 0, moment, None)
        threading.Event().wait()
    def f(n):
        if n == 1: return 1
        {end}
    """
    verdict = judge(program, ["assert f(1) == 1", "assert f(2) == 2"])
    assert verdict.score == 0.5 and not verdict.failed, verdict


def test_what_a_program_raises_can_be_written_to_a_log():
    verdict = judge("def f(): raise ValueError('half \\ud800')", ["assert f() == 1"])
    assert verdict == Verdict(0.0, "case 1 of 1: line 1 of the test: ValueError: half ?")


EXPECTS_AN_ERROR = "try:\n    f(-1)\nexcept Exception:\n    pass\nelse:\n    assert False"


@pytest.mark.parametrize(
    ("program", "test"),
    [("x = 1", EXPECTS_AN_ERROR), ("f = 3", EXPECTS_AN_ERROR), ("class f(Exception): pass", "assert f(7)")],
)
def test_a_program_without_the_tested_function_is_no_fault_of_the_row(program, test):
    verdict = judge(program, [test])
    assert verdict.score == 0.0 and not verdict.failed and "no function of the program" in verdict.reason
    assert judge("def f(n): return n if n > 0 else n.error", [test]) == Verdict(1.0)


@pytest.mark.parametrize("cases", [[f"assert f() == {n}" for n in range(50)], [{"input": "", "output": "1"}] * 50])
def test_all_tests_share_the_time_of_the_answer(cases):
    program = "import time\nprint(1, flush=True)\ndef f(): time.sleep(1000)\nif __name__ == '__main__': f()"
    start = monotonic()
    verdict = verify(f"```python\n{program}\n```", cases, Limits(), "share", within_s=0.5)
    assert verdict.score == 0.0 and not verdict.failed and "case 1 of 50" in verdict.reason
    assert monotonic() - start < deadline(20)


@pytest.mark.deep
def test_a_case_that_takes_all_the_time_leaves_what_passed_before():
    program = "import time\ndef f(n): return 1 if n == 1 else time.sleep(1000)"
    cases = ["assert f(1) == 1", "assert f(2) == 2", "assert f(1) == 1"]
    verdict = verify(f"```python\n{program}\n```", cases, Limits(), "share", within_s=deadline(1))
    assert verdict == Verdict(
        1 / 3, f"case 2 of 3: the cases before it took the {deadline(1):g} s that all of them share"
    )


def test_standard_input_and_output_are_compared_token_by_token():
    program = "a, b = map(int, input().split())\nprint(a + b, '\\n', a / b, end='')"
    pairs = [("1 2\n", "3\n0.5\n"), ("4 2", " 6  2.0 \n\n"), ("4 2", "6 2"), ("1 2", "3"), ("1", "")]
    cases = [{"input": text, "output": output} for text, output in pairs]
    verdict = judge(program, cases)
    assert verdict == Verdict(0.4, "case 3 of 5: other output")
    last = judge(program, [{"input": "1", "output": "1"}])
    assert last.score == 0 and "exit status 1: ValueError: not enough values to unpack" in last.reason
    assert judge("import sys\nprint(5)\nsys.exit(1)", [{"input": "", "output": "5"}]).score == 0


# --- what the tests see of a program ---

SEEN = {
    "values": ("def f(x): return x", "for x in {VALUES}:\n    y = f(x)\n    assert y == x and type(y) is type(x)"),
    "named arguments": ("def f(a, *, b=2): return a - b", "assert f(5) == 3 and f(a=1, b=1) == 0 and f(2, b=3) == -1"),
    "changed arguments": (
        "def f(a, b):\n    a.sort()\n    b['x'] = a[:]\n    return None",
        "a, b = [3, 1], {}\nassert f(a, b) is None\nassert a == [1, 3] and b == {'x': [1, 3]}",
    ),
    "exceptions": (
        "class Own(KeyError): pass\ndef f(x):\n    if x: raise ValueError('no', 3)\n    raise Own('key')",
        "try:\n    f(1)\nexcept ValueError as e:\n    assert e.args == ('no', 3)\nelse:\n    assert False\n"
        "try:\n    f(0)\nexcept KeyError:\n    pass\nelse:\n    assert False",
    ),
    "exceptions of the program": (
        "class Own(ValueError): pass\ndef f(x):\n    if x: raise Own('no')\n    raise ValueError",
        "try:\n    f(1)\nexcept Own as e:\n    assert str(e) == 'no'\nelse:\n    assert False\n"
        "try:\n    f(0)\nexcept Own:\n    assert False\nexcept ValueError:\n    pass\nelse:\n    assert False\n"
        "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
    ),
    "a builtin function under another name": ("f = sorted", "assert f([2, 1]) == [1, 2]"),
    "a builtin class under another name": ("f = int", "assert f('2') == 2"),
    "objects": (
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
        "    def __eq__(self, other): return self.value == other.value\n    def __len__(self): return 7\n"
        "    def __getitem__(self, i): return i * 2\n    def __str__(self): return 'node'\n"
        "def last(node):\n    while node.next: node = node.next\n    return node",
        "a = Node(1)\na.next = Node(2)\nassert last(a).value == 2 and a.next.next is None and isinstance(a, Node)\n"
        "assert last(a) == Node(2) and last(a) != a and not a == 1 and a != 1\n"
        "assert len(a) == 7 and a[4] == 8 and str(a) == 'node' and not isinstance(3, Node)",
    ),
    "iterators": (
        "def f(n):\n    for i in range(n): yield i\n    return 5",
        "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0 and 2 in f(4) and 9 not in f(4)",
    ),
    "functions of the test": (
        "def f(g, xs): return [g(x) for x in xs]",
        "seen = []\ndef g(x):\n    seen.append(x)\n    if x > 2: raise KeyError('big')\n    return 2 * x\n"
        "assert f(g, [1, 2]) == [2, 4] and seen == [1, 2]\n"
        "try:\n    f(g, [3])\nexcept KeyError:\n    pass\nelse:\n    assert False",
    ),
    "iterators of the test": (
        "def f(g, xs): return [x for i in xs for x in g(i)]\ndef first(xs): return next(iter(xs))",
        "def g(n):\n    for i in range(n): yield i\nassert f(g, [1, 2]) == [0, 0, 1] and f(g, g(3)) == [0, 0, 1]\n"
        "import itertools\nassert first(itertools.count(5)) == 5 and f(iter, iter([[1], (2,)])) == [1, 2]",
    ),
    "functions of the program": ("def f(n):\n    return lambda m: n * m", "assert f(3)(4) == 12"),
    "classes with a method": (
        "class Solution:\n    def add(self, a, b): return a + b",
        "assert Solution().add(1, 2) == 3",
    ),
    "a function with a builtin's name": ("def sum(a, b): return a * b", "assert sum(2, 5) == 10"),
    "modules that only the program imports": ("import math\ndef f(x): return x", "assert math.isclose(f(0.5), 0.5)"),
    "dataclasses": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(p): return P(p.x + 1)",
        "assert f(P(1)) == P(2)",
    ),
    "large and special numbers": (
        "def f(n): return [10 ** n, -10 ** n, float('inf'), float('nan'), -0.0, 1e-320]",
        "import math\na, b, c, d, e, g = f(9999)\nassert a == 10 ** 9999 == -b and c == math.inf and d != d\n"
        "assert math.copysign(1, e) == -1 and g == 1e-320",
    ),
    "annotations": (
        "class A:\n    x: int = 0\ndef f(): return A.__annotations__['x']",
        "class B:\n    y: str\nassert f() == int and B.__annotations__ == {'y': str}",
    ),
    "views and constants": (
        "from types import MappingProxyType\na = {'a': 1}\n"
        "def f(): return a.keys(), a.items(), MappingProxyType(a), memoryview(b'ab'), ..., NotImplemented",
        "a, b, c, d, e, g = f()\nassert a == {'a'} and b == {('a', 1)} and c == {'a': 1} and d == b'ab'\n"
        "assert e is ... and g is NotImplemented",
    ),
    "a zone": (
        "import datetime, zoneinfo\n"
        "def f(): return datetime.datetime(2020, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Berlin'))",
        "assert f().tzname() == 'CEST' and str(f().tzinfo) == 'Europe/Berlin'",
    ),
    "a default of the program": (
        "import collections\ndef f(): return collections.defaultdict(lambda: 5, a=1)",
        "d = f()\nassert d['b'] == 5 and d == {'a': 1, 'b': 5}",
    ),
    "a changed deque": ("def f(d): d.append(3)", "import collections as c\nd = c.deque([1])\nf(d)\nassert d[1] == 3"),
    "attributes of an exception": (
        "class Own(Exception):\n    def __init__(self, code):\n        super().__init__(f'no {code}')\n"
        "        self.code = code\ndef f(): raise Own(3)",
        "for kind in Own, Exception:\n    try:\n        f()\n    except kind as e:\n"
        "        assert e.code == 3 and str(e) == 'no 3'\n    else:\n        assert False",
    ),
    "operators": (
        "import functools\n@functools.total_ordering\nclass Vec:\n    def __init__(self, v): self.v = v\n"
        "    def __add__(self, o): return Vec(self.v + o.v)\n    def __mul__(self, k): return Vec(self.v * k)\n"
        "    __rmul__ = __mul__\n    def __neg__(self): return Vec(-self.v)\n"
        "    def __abs__(self): return abs(self.v)\n"
        "    def __iadd__(self, o):\n        self.v += o.v\n        return self\n"
        "    def __lt__(self, o): return self.v < o.v\n    def __eq__(self, o): return self.v == o.v\n"
        "    def __hash__(self): return hash(self.v)\n    def __float__(self): return self.v / 2\n"
        "    def __delitem__(self, i): self.v = i\nclass Sub(Vec): pass",
        "a, b = Vec(1), Vec(2)\n"
        "assert a < b and b >= a and not a > b and sorted([b, a])[0].v == 1 and max(a, b).v == 2\n"
        "assert (a + b).v == 3 and (2 * b * 3).v == 12 and (-a).v == -1 and abs(Vec(-4)) == 4 and float(b) == 1.0\n"
        "c = a\na += b\nassert c.v == 3 and len({a, c, Vec(3)}) == 1 and {b: 5}[Vec(2)] == 5\n"
        "del a[7]\nassert c.v == 7 and issubclass(Sub, Vec) and not issubclass(Vec, Sub)",
    ),
    "with": (
        "from contextlib import contextmanager\nlog = []\nclass Pool:\n    def __enter__(self): return self\n"
        "    def __exit__(self, kind, error, trace): log.append(kind and (kind.__name__, str(error)))\n"
        "@contextmanager\ndef opened(x):\n    yield x\n    log.append('closed')",
        "with Pool() as p, opened(3) as x:\n    assert x == 3 and isinstance(p, Pool)\n"
        "try:\n    with Pool():\n        raise ValueError('no')\nexcept ValueError:\n    pass\n"
        "else:\n    assert False\n"
        "assert log == ['closed', None, ('ValueError', 'no')]",
    ),
    "asyncio": (
        "import asyncio\nasync def f(n):\n    await asyncio.sleep(0)\n"
        "    if n < 0: raise KeyError(n)\n    return n + 1\n"
        "async def g(n):\n    for i in range(n): yield i\nasync def both(tasks): return await asyncio.gather(*tasks)\n"
        "class Pool:\n    def __init__(self): self.queue = asyncio.Queue()\n"
        "    async def __aenter__(self): return self\n"
        "    async def __aexit__(self, *_): await self.queue.put(5)",
        "import asyncio\nasync def main():\n    assert [x async for x in g(3)] == [0, 1, 2]\n"
        "    assert await asyncio.wait_for(f(1), 5) == 2\n    async with Pool() as p:\n        await p.queue.put(4)\n"
        "    assert await p.queue.get() == 4 and await p.queue.get() == 5\n    try:\n        await f(-1)\n"
        "    except KeyError:\n        return await asyncio.gather(f(1), f(2))\n"
        "assert asyncio.run(main()) == [2, 3] and asyncio.run(f(5)) == 6 and asyncio.run(both([f(1), f(2)])) == [2, 3]",
    ),
    "variables that change": (
        "n, seen = 0, []\ndef f():\n    global n\n    n += 1\n    seen.append(n)",
        "def check():\n    assert n == 2\nassert n == 0\nf()\nassert n == 1 and seen == [1]\nf()\ncheck()\nn = 7\nf()\n"
        "assert n == 7 and seen == [1, 2, 3]",
    ),
    "no main block": ("def f(): return __name__\nif __name__ == '__main__': input()", "assert f() == 'program'"),
}

VALUES = """[None, True, 3, 2 ** 70, 1.5, 'é\\ud800', b'\\x00\\xff', bytearray(b'a'), [1, [2]], (1, (2,)), {1, 2},
    frozenset({3}), {1: 'a', (2, 3): [4]}, 1j, range(1, 9, 2), int, dict, [], {}]"""


@pytest.mark.parametrize("name", SEEN)
def test_what_the_tests_see(name):
    program, test = SEEN[name]
    assert judge(program, [test.replace("{VALUES}", VALUES)]) == Verdict(1.0)


RAISED = {
    "json.JSONDecodeError": "json.loads('x')",
    "decimal.DivisionByZero": "decimal.Decimal(1) / 0",
    "decimal.DecimalException": "decimal.Decimal(1) / 0",
    "decimal.InvalidOperation": "decimal.Decimal('x')",
    "subprocess.CalledProcessError": "raises(subprocess.CalledProcessError(1, 'x'))",
    "queue.Empty": "queue.Queue().get_nowait()",
    "dataclasses.FrozenInstanceError": "setattr(P(1), 'x', 2)",
    "UnicodeDecodeError": "b'\\xff'.decode()",
}


@pytest.mark.parametrize("name", RAISED)
def test_an_exception_of_the_standard_library_is_caught_by_its_name(name):
    program = f"""
        import dataclasses, decimal, json, queue, subprocess
        from json import JSONDecodeError
        @dataclasses.dataclass(frozen=True)
        class P:
            x: int
        def raises(error): raise error
        def f(): {RAISED[name]}
        """
    modules = "import dataclasses, decimal, json, queue, subprocess\n"
    test = f"{modules}try:\n    f()\nexcept {name} as error:\n    assert str(error)\nelse:\n    assert False"
    if name == "queue.Empty":
        test = test.replace("assert str(error)", "pass")
    assert judge(program, [test]) == Verdict(1.0)
    assert judge(program, [f"{modules}try:\n    f()\nexcept KeyError:\n    assert f"]).score == 0.0


def test_a_group_of_exceptions_is_none_of_its_exceptions():
    program = "def f(): raise ExceptionGroup('a', [ValueError(1)])"
    test = "try:\n    f()\nexcept {} as error:\n    assert str(error)\nelse:\n    assert False"
    assert judge(program, [test.format("ValueError")]).score == 0.0
    assert judge(program, [test.format("Exception")]).score == 1.0


def test_a_program_cannot_skip_a_test_of_unittest():
    test = (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 2)\n"
        "ran = unittest.TextTestRunner().run(T('test_a'))\nassert ran.wasSuccessful()"
    )
    assert judge("def f(x): return 2", [test]) == Verdict(1.0)
    skips = "import unittest\ndef f(x): raise unittest.SkipTest\nSkipTest = unittest.SkipTest"
    assert judge(skips, [test]).score == 0.0


class Colour(IntEnum):
    RED = 3


VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.lists(inner).map(deque)
    ),
    max_leaves=20,
)


def through_a_message(value):
    def refuse(reference):
        raise ValueError(reference)

    return decode(json.loads(json.dumps(encode(value, refuse))), refuse)


@settings(max_examples=cover.examples(100), deadline=None)
@given(VALUE)
def test_a_value_survives_a_message(value):
    back = through_a_message(value)
    assert back == value and repr(back) == repr(value)


def test_what_extends_a_builtin_type_travels_as_this_type():
    class Sly(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    class Words(dict):
        pass

    for value, plain in ((Sly(3), 3), (Colour.RED, 3), (Words(a=2), {"a": 2}), (Fraction(2, 4), Fraction(1, 2))):
        back = through_a_message(value)
        assert back == plain and type(back) is type(plain)
    assert through_a_message(Decimal("1.50")).as_tuple() == Decimal("1.50").as_tuple()


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        date(2020, 1, 31),
        datetime(2020, 1, 31, 12, 30, 5, 7),
        datetime(2020, 1, 31, tzinfo=timezone(timedelta(hours=2))),
        time(12, 30),
        timedelta(days=-3, seconds=7, microseconds=5),
        timezone(timedelta(hours=-5)),
        UUID(int=5),
        Path("a") / "b",
        PurePosixPath("/a"),
        Counter("aab"),
        OrderedDict(b=1, a=2),
        defaultdict(list, {"a": [1]}),
        ChainMap({"a": 1}, {"b": 2}),
        UserDict(a=1),
        UserList([1]),
        UserString("a"),
        datetime(2020, 1, 31, fold=1),
        timezone(timedelta(hours=1), "X"),
        deque([1, 2], maxlen=3),
        Decimal("NaN"),
        Point(1, [2, Point(3, 4)]),
    ],
    ids=repr,
)
def test_a_value_of_the_standard_library_is_itself_on_the_other_side(value):
    back = through_a_message(value)
    assert repr(back) == repr(value) and (type(back) is type(value) or isinstance(value, Point))
    text = f"{type(value).__name__ if isinstance(value, UserDict | UserList | UserString) else ''}({value!r})"
    modules = "collections", "datetime", "decimal", "pathlib", "uuid"
    imports = "".join(f"from {module} import *\n" for module in modules)
    imports += "import datetime as d\nPoint = namedtuple('Point', 'x y')\n"
    text = text.replace("datetime.", "d.").replace("<class 'list'>", "list")
    if value == value:
        program = f"{imports}def f():\n    return {text}\ndef g(x):\n    return type(x).__name__, x == f(), repr(x)"
        test = f"{imports}assert f() == {text} and g({text}) == ({type(value).__name__!r}, True, {repr(value)!r})"
        assert judge(program, [test]) == Verdict(1.0)


def test_no_program_chooses_by_a_call_that_the_row_is_broken():
    test = "class Own: pass\ndef g(x): return Own() if x else 1\nassert f(g) == 1"
    assert judge("def f(g): return g(0)", [test]) == Verdict(1.0)
    verdict = judge("def f(g): return g(1)", [test])
    assert verdict.score == 0.0 and "gives the program an object of type Own" in verdict.reason


def test_a_comparison_with_what_cannot_travel_is_a_fault_of_the_row():
    verdict = judge("def f():\n    class A: pass\n    return A()", ["import re\nassert f() == re.compile('a')"])
    assert verdict.failed and "compares the program's result with an object of type Pattern" in verdict.reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(
            st.sampled_from(
                ["int", "dict", "set", "type", "bytes", "range", "object", "complex", "namedtuple", *STANDARD, *VIEWS]
            ),
            inner,
        ).map(list)
        | st.dictionaries(st.text(), inner)
    ),
)


@settings(max_examples=cover.examples(200), deadline=None)
@given(JSON)
def test_no_message_makes_another_kind_of_value(data):
    """What a hostile program sends is refused, or gives values of known types."""
    known = (int, float, str, bytes, bytearray, list, tuple, set, frozenset, dict, complex, range, type, type(None))
    try:
        value = decode(data, lambda reference: None)
    except Exception:
        return
    standard = [getattr(import_module(module), name) for name, module in STANDARD.items()]
    views = [type({}.keys()), type({}.items()), type(vars(type)), memoryview, type(...), type(NotImplemented)]
    assert type(value) in (*known, bool, *standard, *views) or type(value).__mro__[1:] == (tuple, object)


# --- forgeries ---


ESSENTIAL_FORGERIES = [  # of each kind
    "equals everything",
    "calls itself another class",
    "exits in the call",
    "ends the loop of the test",
    "raises what cannot be shown",
    "writes a verdict everywhere",
    "answers with another kind",
    "patches the builtins",
    "patches its caller",
    "reads the expected value",
]


@pytest.mark.parametrize("name", cover.essential(FORGERIES, *ESSENTIAL_FORGERIES))
def test_no_forgery_passes(name):
    verdict = judge(FORGERIES[name], [FORGED_TEST], cpu_s=1, memory_bytes=1 << 29)
    assert verdict.score == 0.0 and not verdict.failed and verdict.reason


SLY = """
class Sly:
    def __init__(self, *_): pass
    def __getattr__(self, name): return lambda *_: True
    def __enter__(self): return self
    def __exit__(self, *error):
        if error[0] and quick: raise KeyError
        return True
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __eq__ = __lt__
    def __sub__(self, other): return 0.0
    __rsub__ = __truediv__ = __mod__ = __xor__ = __isub__ = __sub__
    def __hash__(self): return hash(5)
    def __await__(self):
        return self
        yield
quick, passed = True, 0
async def later(x): return Sly()
def answer(x):
    global passed
    passed = 1
    return Sly()
class Circle(Sly):
    def area(self): return Sly()
"""


@pytest.mark.parametrize(
    "tests",
    [
        ["assert abs(answer(1) - 5) < 1e-6", "assert abs(5 - answer(1)) < 1e-6", "assert answer(1) < 5"],
        ["assert abs(Circle(1).area() - 5) < 1e-6", "assert 1 <= answer(1) <= 5", "assert 5 in {answer(1)}"],
        ["a = answer(1)\na -= 5\nassert a == 0.0", "assert answer(1) % 5 == 0.0", "assert not answer(1) ^ 5"],
        [
            "with answer(1) as x:\n    assert x == 5",
            "try:\n    with answer(1) as x:\n        assert x == 5\nexcept KeyError: 0",
        ],
        [
            "import asyncio\nassert asyncio.run(later(1)) == 5",
            "passed = 0\nif answer(1) == 5: passed += 1\nassert passed",
        ],
        [
            "def check():\n    global passed\n    passed = 0\n    if answer(1) == 5: passed += 1\n"
            "    assert passed\ncheck()"
        ],
    ],
)
def test_no_operator_of_the_program_judges_it(tests):
    for verdict in (judge(SLY, tests), judge(SLY.replace("quick, passed = True", "quick, passed = False"), tests)):
        assert verdict.score == 0.0 and not verdict.failed, verdict


@pytest.mark.deep
def test_a_value_without_end_is_a_failure():
    program = "import itertools\ndef answer(n): return itertools.count()"
    verdict = judge(program, ["assert list(answer(3)) == [3]"], cpu_s=1)
    assert verdict.score == 0.0 and "used the CPU for more than 1 s" in verdict.reason


def test_a_test_that_catches_everything_is_not_passed_by_an_end():
    test = "try:\n    assert answer(1) == 5\nexcept BaseException as error:\n    assert isinstance(error, KeyError)"
    assert judge("import os\ndef answer(n): os._exit(0)", [test]).score == 0.0
    quiet = "done = 1\ntry:\n    answer(1)\nexcept:\n    pass\nassert done"
    assert judge("import os\ndef answer(n): os._exit(0)", [quiet]).score == 0.0
    assert judge("def answer(n): raise KeyError", [test, quiet]) == Verdict(1.0)


def test_the_main_block_of_a_test_runs():
    test = "def main():\n    assert answer(1) == 5\nif __name__ == '__main__':\n    main()"
    assert judge("def answer(n): return n", [test]).score == 0.0
    assert judge("def answer(n): return 5", [test]).score == 1.0


def test_the_forged_test_can_be_passed():
    assert judge("def answer(n): return {3: 9051, 4: 11734, 5: 17, 6: 7}[n]", [FORGED_TEST]) == Verdict(1.0)


# --- real rows ---


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
