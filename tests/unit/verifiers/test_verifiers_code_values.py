"""Values and exceptions of a program arrive at its tests as they are, and no message makes another kind of value."""

from __future__ import annotations

import json
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from importlib import import_module
from pathlib import Path, PurePosixPath
from uuid import UUID

import cover
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_programs import judge

from megatron_rl.types import Verdict
from megatron_rl.verifiers.sandbox.messages import STANDARD, VIEWS, decode, encode

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
