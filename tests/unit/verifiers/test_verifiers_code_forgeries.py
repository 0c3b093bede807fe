"""No program passes tests that it does not pass by what it computes."""

from __future__ import annotations

import cover
import pytest
from hostile import FORGED_TEST, FORGERIES
from judged_programs import judge

from megatron_rl.types import Verdict


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


def test_a_program_cannot_skip_a_test_of_unittest():
    test = (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 2)\n"
        "ran = unittest.TextTestRunner().run(T('test_a'))\nassert ran.wasSuccessful()"
    )
    assert judge("def f(x): return 2", [test]) == Verdict(1.0)
    skips = "import unittest\ndef f(x): raise unittest.SkipTest\nSkipTest = unittest.SkipTest"
    assert judge(skips, [test]).score == 0.0


def test_no_program_chooses_by_a_call_that_the_row_is_broken():
    test = "class Own: pass\ndef g(x): return Own() if x else 1\nassert f(g) == 1"
    assert judge("def f(g): return g(0)", [test]) == Verdict(1.0)
    verdict = judge("def f(g): return g(1)", [test])
    assert verdict.score == 0.0 and "gives the program an object of type Own" in verdict.reason


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
