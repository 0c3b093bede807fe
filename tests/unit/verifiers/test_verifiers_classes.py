"""A program's objects get a test's values as operands only if the test uses them as objects of a class."""

import pytest
from judged_programs import judge

from megatron_rl.types import Verdict
from megatron_rl.verifiers.sandbox.classes import classes_of

JUDGES_ITSELF = """
class Sly:
    def __sub__(self, other): return 0.0
    __rsub__ = __mod__ = __xor__ = __isub__ = __floordiv__ = __sub__
    def __mul__(self, other): return self
    __rmul__ = __add__ = __radd__ = __mul__
    def __abs__(self): return 0.0
    def __eq__(self, other): return True
    def startswith(self, other): return True
    endswith = issubset = startswith
    def difference(self, other): return set()
"""
DEFINED = [
    "def Area(*x): return Sly()",
    "class Area:\n    def __new__(cls, *x): return Sly()",
    "class Area(Sly):\n    def __init__(self, *x): pass",
]
OF_RESULTS = [
    "assert abs(Area(1) - 2.5) < 1e-6",
    "assert abs(2.5 - Area(1)) < 1e-6",
    "assert Area([1]) % 7 == 0",
    "assert not Area(1) ^ 5",
    "area = Area(1)\narea -= 5\nassert area == 0.0",
    "for x, y in [(1, 2.5), (2, 5)]:\n    assert abs(Area(x) - y) < 1e-9, f'{Area(x) - y}'",
    "def check(candidate):\n    assert abs(candidate(1) - 2.5) < 1e-6\ncheck(Area)",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertAlmostEqual(Area(1), 2.5)\n"
    "T('test_a').debug()",
    "assert Area('x').startswith('abc')",
    "assert Area([1]).issubset({1, 2})",
    "assert not Area([1]).difference({1, 2})",
]
OF_OBJECTS = [
    "assert (Area(1) * 2).side == 2",
    "a = Area(1)\nb = 2 * a\nassert b.side == 2",
    "a = Area(1)\na *= 2\nassert a.side == 2",
    "assert Area(1) * 2 == Area(2)",
    "a, b = Area(1) * 2, Area(2)\nassert a == b",
    "assert str(Area(1) * 2) == 'Area(2)'",
    "a = Area(1)\nassert isinstance(a, Area) and abs(a * 2) == 2",
    "a = Area()\nassert abs(a * 2) == 6",
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.a = Area(1)\n"
    "    def test_a(self): self.assertEqual(self.a * 2, Area(2))\nunittest.TextTestRunner().run(T('test_a'))\n"
    "t = T('test_a')\nt.debug()",
    "assert Area(1).startswith(1) and abs(Area.unit()) == 1",
]


@pytest.mark.parametrize("test", OF_RESULTS)
def test_a_name_with_a_capital_letter_whose_results_are_compared_is_a_function(test):
    assert not classes_of(test)
    for defined in DEFINED:
        verdict = judge(JUDGES_ITSELF + defined, [test])
        assert verdict.score == 0.0 and not verdict.failed, (defined, verdict)


@pytest.mark.parametrize("test", OF_OBJECTS)
def test_operators_of_objects_that_a_test_uses_take_its_values(test):
    program = """
        class Area:
            def __init__(self, side=3): self.side = side
            def __mul__(self, factor): return Area(self.side * factor)
            __rmul__ = __mul__
            def __eq__(self, other): return self.side == other.side
            def __abs__(self): return self.side
            def __repr__(self): return f"Area({self.side})"
            def startswith(self, side): return self.side == side
            @staticmethod
            def unit(): return Area(1)
        """
    assert "Area" in classes_of(test)
    assert judge(program, [test]) == Verdict(1.0)


def test_what_is_no_python_uses_no_class():
    assert classes_of("assert (") == frozenset() == classes_of("Area()" + " " * (1 << 20))
