"""What the tests hold in the place of an object of the program (`program_tests.py`). Only the standard library is used,
as in script.py.

Invariant: no operand of a comparison with what is no object of the program is sent to the program, also not by an
operator that comes before (`abs(f(1) - 2) < 1e-6`); so the program cannot learn what is expected, nor judge itself.
"""

from __future__ import annotations

from megatron_rl.verifiers.sandbox.messages import sent_error

TYPE_CHECKING = False  # the module typing needs 5 ms for its import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from megatron_rl.verifiers.sandbox.program_tests import TestedProgram


JUDGES = frozenset(
    "startswith endswith issubset issuperset isdisjoint difference symmetric_difference equals __contains__".split()
)
"""Methods that tell whether an object is as their argument says. A result may only be judged by the methods of the
builtin types, which are in the process of the tests."""


class Names(dict[str, Any] if TYPE_CHECKING else dict):  # type: ignore[misc]  # the module typing is not there
    """The global names of a test. A value of the program that the test has not set is asked for again after the program
    has run, because it may be another one by then."""

    def __init__(self, program: TestedProgram, data: dict[str, Any]) -> None:
        values = {name: program.decode(item) for name, item in data.items()}
        super().__init__(values)
        self._program = program
        self._data = {name: item for name, item in data.items() if type(values[name]) is not Remote}
        self._told = dict.fromkeys(self._data, program.num_requests)

    def __setitem__(self, name: str, value: Any) -> None:
        self._data.pop(name, None)
        super().__setitem__(name, value)

    def __getitem__(self, name: str) -> Any:
        if name in self._data and self._told[name] != self._program.num_requests:
            self._told[name] = self._program.num_requests
            new = self._program.data_of({name}).get(name, self._data[name])
            if new != self._data[name]:
                self._data[name] = new
                super().__setitem__(name, self._program.decode(new))
        return super().__getitem__(name)


class Remote:
    """An object in the program's process: a function, a class, or an object of a type that does not travel."""

    __slots__ = ("_remote_kind", "_number", "_program")
    _remote_kind: str
    """`class` if the test uses it as one (`classes.py`); `made` if the test has made it by calling one; or empty."""
    _number: int
    _program: TestedProgram

    def __init__(self, program: TestedProgram, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_remote_kind", "")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return made(self._program.ask("call", self, list(arguments), options), self._remote_kind == "class")

    def __getattr__(self, name: str) -> Any:
        if name in JUDGES and self._remote_kind != "made":
            raise AttributeError(f"an object of the program's own class is in the place of one with `{name}`")
        return self._program.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._program.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._program.ask("setitem", self, key, value)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._program.ask("iter", self)
        while True:
            try:
                yield self._program.ask("next", iterator)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._program.ask("next", self)

    def __len__(self) -> int:
        return int(self._program.ask("len", self))

    def __bool__(self) -> bool:
        return self._program.ask("bool", self) is True

    def __str__(self) -> str:
        return str(self._program.ask("str", self))

    def __repr__(self) -> str:
        return str(self._program.ask("repr", self))

    def __eq__(self, other: object) -> bool:
        """Two of the program's own objects are compared by the program; nothing else equals one. An object that does
        not travel could never equal the program's result."""
        if type(other) is not Remote and not callable(other):
            self._program.require_that_it_travels(other)
        return type(other) is Remote and self._program.ask("eq", self, other) is True

    def __hash__(self) -> int:
        return hash(self._program.ask("operate", "hash", self))

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and self._program.ask("isinstance", value, self) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return type(kind) is Remote and self._program.ask("operate", "issubclass", kind, self) is True

    def __enter__(self) -> Any:
        return made(self._program.ask("enter", self), self._remote_kind == "made")

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> None:
        """An error of the test goes on, and none takes its place: the program could end the asserts otherwise."""
        leave(self, "exit", error)

    async def __aenter__(self) -> Any:
        return made(self._program.ask("aenter", self), self._remote_kind == "made")

    async def __aexit__(self, _: Any, error: BaseException | None, trace: Any) -> None:
        leave(self, "aexit", error)

    def __await__(self) -> Iterator[Any]:
        yield from ()  # Python asks for a generator
        return self._program.ask("await", self)  # type: ignore[no-any-return]  # what `await` gives

    def __aiter__(self) -> Any:
        return self._program.ask("aiter", self)

    async def __anext__(self) -> Any:
        return self._program.ask("anext", self)


def leave(manager: Remote, operation: str, error: BaseException | None) -> None:
    if error is None:
        manager._program.ask(operation, manager, None)
    elif isinstance(error, Exception):
        from contextlib import suppress

        with suppress(Exception):
            manager._program.ask(operation, manager, sent_error(error))


def made(result: Any, is_made: bool) -> Any:
    if is_made and type(result) is Remote:
        object.__setattr__(result, "_remote_kind", "made")
    return result


def operate(name: str, operands: list[Any]) -> Any:
    """The result of an operator. Values of the test are operands only of what the test has made: another object may be
    a result, and its operator would learn what is expected, and judge itself."""
    remotes = [operand for operand in operands if type(operand) is Remote]
    are_made = all(remote._remote_kind == "made" for remote in remotes)
    if not are_made and len(remotes) < len(operands):
        return NotImplemented
    return made(remotes[0]._program.ask("operate", name, *operands), are_made)


def method_of(name: str, is_reflected: bool = False) -> Callable[..., Any]:
    if is_reflected:
        return lambda self, other: operate(name, [other, self])
    return lambda self, *others: operate(name, [self, *others])


def comparison_of(name: str) -> Callable[..., Any]:
    def compare(self: Remote, other: Any) -> Any:
        return self._program.ask("operate", name, self, other) if type(other) is Remote else NotImplemented

    return compare


def conversion_of(name: str) -> Callable[..., Any]:
    """Conversions take no operand, so they cannot reveal the expected value."""
    return lambda self, *options: self._program.ask("operate", name, self, *options)


for name in "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split():
    function = f"{name}_" if name in ("and", "or") else name
    setattr(Remote, f"__{name}__", method_of(function))
    setattr(Remote, f"__r{name}__", method_of(function, is_reflected=True))
    if name != "divmod":
        setattr(Remote, f"__i{name}__", method_of(f"i{name}"))
for name in "lt le gt ge".split():
    setattr(Remote, f"__{name}__", comparison_of(name))
for name in "neg pos invert abs int float index round format delattr delitem".split():
    setattr(Remote, f"__{name}__", conversion_of(name))


def replace(old: Any, new: Any) -> None:
    """Give a container of the tests the contents that it has in the program."""
    if type(old) is type(new) and hasattr(old, "clear"):
        old.clear()
        (old.update if hasattr(old, "update") else old.extend)(new)
