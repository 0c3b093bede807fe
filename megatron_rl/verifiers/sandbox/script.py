"""Runs a program inside the sandbox. Only the standard library is used, because the process is a bare interpreter that
cannot import this package, and little of it, because every import costs each process some milliseconds."""

from __future__ import annotations

import builtins
import io
import os
import sys
from types import CodeType, ModuleType

TYPE_CHECKING = False  # the module typing needs 5 ms for its import
if TYPE_CHECKING:
    from typing import Any

IMPORTED = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Literal Mapping"
    " NamedTuple NoReturn Optional OrderedDict Sequence Set Tuple Type TypeVar Union",
    "collections": "ChainMap Counter OrderedDict UserDict defaultdict deque namedtuple",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering",
    "itertools": "accumulate batched chain combinations combinations_with_replacement compress count cycle dropwhile"
    " filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "math": "acos asin atan atan2 ceil comb cos dist e exp fabs factorial floor fmod fsum gcd hypot inf isclose"
    " isfinite isinf isnan isqrt lcm log log10 log2 modf nan perm pi prod radians sin sqrt tan tau trunc",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits hexdigits punctuation",
    "operator": "add and_ attrgetter floordiv itemgetter methodcaller mod mul neg or_ sub truediv xor",
    "copy": "copy deepcopy",
    "random": "choice randint randrange sample shuffle uniform",
    "datetime": "date datetime timedelta",
    "statistics": "mean median mode stdev variance",
    "fractions": "Fraction",
    "decimal": "Decimal",
    "dataclasses": "dataclass field",
    "enum": "Enum IntEnum auto",
    "io": "StringIO",
    "re": "",
    "json": "",
    "time": "",
    "os": "",
    "sys": "",
}
"""What the graders of LeetCode and LiveCodeBench import before a program: the modules, and names in them."""


STREAMS = {f"/dev/{name}": number for number, name in enumerate(("stdin", "stdout", "stderr"))}


def run_script(program: str) -> None:
    """Run the program as `python program.py` would: with its standard input and output, also under their paths in
    /dev, which the sandbox does not have."""
    system_open = open

    def open_stream(file: Any, *arguments: Any, **options: Any) -> Any:
        number = STREAMS.get(os.fspath(file)) if isinstance(file, str | os.PathLike) else None
        return system_open(file if number is None else os.dup(number), *arguments, **options)

    vars(builtins)["open"] = vars(io)["open"] = open_stream
    exec(compiled(program, "program.py"), module_of("__main__").__dict__)


def compiled(text: str, name: str) -> CodeType:
    """The code of a text, without the effect of this module's __future__ import."""
    code: CodeType = compile(text, name, "exec", dont_inherit=True)
    return code


def module_of(name: str) -> ModuleType:
    """A new module under a name by which dataclasses and pickle can find it."""
    sys.modules[name] = module = ModuleType(name)
    # Python without the module `site`, which the sandbox leaves out, has no `exit` and `quit`.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    return module


def imported(names: set[str]) -> dict[str, Any]:
    """The modules in IMPORTED, and the names in them, that a program uses. As in LiveCodeBench, a module wins over a
    function of the same name."""
    found: dict[str, Any] = {}
    for module, its in IMPORTED.items():
        used = names.intersection(its.split())
        found.update((name, getattr(__import__(module), name)) for name in used if hasattr(__import__(module), name))
    return found | {module: __import__(module) for module in names & IMPORTED.keys()}


def names_of(code: CodeType) -> set[str]:
    """The names of globals and attributes that a test uses, without the names that Python itself defines."""
    inner = (item for item in code.co_consts if isinstance(item, CodeType))
    return {name for name in code.co_names if not name.startswith("__")}.union(*map(names_of, inner))


def sets_globals(code: CodeType) -> bool:
    """Whether a function in the code sets a global name."""
    from opcode import opmap

    inner = (item for item in code.co_consts if isinstance(item, CodeType))
    return opmap["STORE_GLOBAL"] in code.co_code[::2] or any(map(sets_globals, inner))
