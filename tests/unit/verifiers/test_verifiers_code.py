"""Verdicts over programs: what is judged, how it is scored, and what ends without a verdict."""

from __future__ import annotations

import math
import sys
import tempfile
from importlib import import_module
from time import monotonic

import pytest
from judged_programs import judge
from patience import deadline

from megatron_rl.types import Verdict
from megatron_rl.verifiers.sandbox import process as sandbox
from megatron_rl.verifiers.sandbox.code import last_block, verify
from megatron_rl.verifiers.sandbox.process import Limits
from megatron_rl.verifiers.sandbox.script import IMPORTED


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


def test_what_a_program_raises_can_be_written_to_a_log():
    verdict = judge("def f(): raise ValueError('half \\ud800')", ["assert f() == 1"])
    assert verdict == Verdict(0.0, "case 1 of 1: line 1 of the test: ValueError: half ?")


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
