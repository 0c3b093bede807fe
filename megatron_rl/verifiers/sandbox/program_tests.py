"""Runs a program and its tests inside the sandbox, in two processes. Only the standard library is used, as in
script.py.

The tests never share an interpreter with the program. The process with the tests sees the program through a pipe: it
asks for calls and gets values. So the program can patch its builtins, read its frames, raise what it likes or end its
process: the assert runs elsewhere, over values of builtin types that were made there from text.

Invariants: what the program answers is only read as data (JSON), and only values of the types in `decode` are made of
it; no operand of a comparison is ever sent to the program, so it cannot learn what is expected, nor judge itself. An
object of the program's own classes stays where it is. The tests hold a `Remote` in its place, whose attributes, items
and calls they can use, and which equals no value of another kind.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from types import CodeType, CoroutineType

from megatron_rl.verifiers.sandbox.messages import (
    MAX_REASON_CHARACTERS,
    Line,
    ProgramError,
    decode,
    encode,
    exception_class,
    exception_of,
    line_of,
    reason_of,
    sent_error,
    sent_exception,
)
from megatron_rl.verifiers.sandbox.operations import OPERATIONS, error_of
from megatron_rl.verifiers.sandbox.remote import Names, Remote, replace
from megatron_rl.verifiers.sandbox.script import compiled, imported, module_of, names_of, sets_globals

TYPE_CHECKING = False  # the module typing needs 5 ms for its import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# --- the program's side ---


class Served:
    """Runs the program's functions for the tests. It trusts nothing of its own process, and nobody trusts it."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._objects: list[Any] = []
        """Every object that the tests refer to; it is kept, so that its id stays its own."""
        self._numbers: dict[int, int] = {}

    def serve(self, program: str, imports: bool) -> None:
        """Load the program, if asked with what it uses of IMPORTED, and answer the tests until they end."""
        module = module_of("program")
        try:
            code = compiled(program, "program.py")
            module.__dict__.update(imported(names_of(code)) if imports else {})
            exec(code, module.__dict__)
        except SystemExit:  # as at the end of a script: what it has defined before can be judged
            pass
        except BaseException as error:
            self._line.send("failed", reason_of(error))
            return
        self._line.send("loaded")
        while True:
            kind, *rest = self._line.receive()
            if kind == "names":
                found = {name: getattr(module, name) for name in rest[0] if hasattr(module, name)}
                self._line.send("names", {name: self._name(value) for name, value in found.items()})
            else:
                self._line.send(*self._answer(kind, rest))

    def _answer(self, operation: str, data: list[Any]) -> list[Any]:
        try:
            arguments = [self._decode(item) for item in data]
            result = self._encode(OPERATIONS[operation](*arguments))
            # A function may change its arguments: the tests then expect to see that.
            after = [self._encode(item) for item in arguments[1]] if operation == "call" else []
            changed = [[i, new] for i, new in enumerate(after) if new != data[1][1 + i]]
            return ["result", result, changed]
        except BaseException as error:
            return ["raised", *sent_exception(error)]

    def _name(self, value: Any) -> Any:
        """What a name of the program stands for. A class is a reference even if it is a builtin one (`f = sorted`), so
        that a test that uses it asks the program."""
        if isinstance(value, type) and issubclass(value, Exception):
            nearest = next(kind.__name__ for kind in value.__mro__ if kind.__module__ == "builtins")
            return ["exception", value.__module__, value.__name__, nearest]
        return self._refer(value) if isinstance(value, type) else self._encode(value)

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _refer(self, value: Any) -> list[Any]:
        if isinstance(value, Callback):
            return ["callback", value.number]
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return ["coroutine" if type(value) is CoroutineType else "object", number]

    def _decode(self, data: Any) -> Any:
        return decode(data, self._resolve)

    def _resolve(self, reference: list[Any]) -> Any:
        kind, number = reference
        return Callback(self, number) if kind == "callback" else self._objects[number]

    def call_back(self, number: int, arguments: tuple[Any, ...]) -> Any:
        """Call a function that the tests gave as an argument."""
        self._line.send("callback", number, self._encode(arguments))
        while True:
            kind, *rest = self._line.receive()
            if kind == "returned":
                return self._decode(rest[0])
            if kind == "callback raised":
                raise error_of(rest)[1]
            self._line.send(*self._answer(kind, rest))


def serve_program(program: str, receive: int, send: int, imports: bool = False) -> None:
    """Answer the tests through two pipes, whose numbers are given, until they end."""
    try:
        Served(Line(receive, send)).serve(program, imports)
    except (EOFError, BrokenPipeError):  # the tests have ended
        pass


def serve_solution(program: str, receive: int, send: int) -> None:
    serve_program(program, receive, send, imports=True)


class Callback:
    """A function of the tests, or the next item of an iterator, in the program's process."""

    def __init__(self, served: Served, number: int) -> None:
        self.served, self.number = served, number

    def __call__(self, *arguments: Any) -> Any:
        return self.served.call_back(self.number, arguments)

    def __iter__(self) -> Callback:
        return self

    __next__ = __call__


# --- the tests' side ---


class ProgramEnded(BaseException):
    """The program's process has ended, or has sent what is no answer."""


class CannotCarry(BaseException):
    """The tests give the program an object that cannot leave their process."""


class TestedProgram:
    """The program as the tests see it."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._callbacks: list[Callable[..., Any]] = []
        self._coroutines: dict[int, tuple[Any, int]] = {}
        """Each coroutine that stands for one of the program, by its id, and the program's number of it. The coroutine
        is kept, so that its id stays its own."""
        self._exceptions: dict[str, type[Exception]] = {}
        """A class for each of the program's exceptions that a test names, so that the test can catch it."""
        self._names: set[str] = set()
        """The names that the test uses."""
        self.num_requests = 0
        self.fault: ProgramEnded | CannotCarry | None = None
        """What ended the exchange. It is kept, because a test may catch every exception."""

    def load(self) -> str | None:
        """Wait until the program has been loaded. Returns why it could not be, or None."""
        match self._receive():
            case ["loaded"]:
                return None
            case ["failed", str(reason)]:
                return f"the program could not be loaded: {reason[:MAX_REASON_CHARACTERS]}"
        raise self._ended("it sent no answer")

    def globals_for(self, code: CodeType, classes: set[str]) -> dict[str, Any]:
        """The names that a test uses and the program defines. `classes` are names that the test uses as
        classes.

        A builtin and a module of the standard library are the tests' own. Otherwise a program could define an `abs`
        that always returns 0. Only if the program defines none of the other names, its `sum` must be what is tested.
        """
        self._names = names_of(code)
        found = self.data_of(self._names)
        own = {name for name in found if not hasattr(builtins, name) and name not in sys.stdlib_module_names}
        if not own:
            return {name: self.decode(data) for name, data in found.items()}
        modules = {name: __import__(name) for name in found if name in sys.stdlib_module_names}
        values = Names(self, {name: found[name] for name in own})
        for name, value in values.items():
            if type(value) is Remote and name in classes:
                object.__setattr__(value, "_remote_kind", "class")
        values.update(modules)
        return dict(values) if sets_globals(code) else values

    def data_of(self, names: set[str]) -> dict[str, Any]:
        """Ask the program for the plain data that these names are bound to."""
        self._send("names", sorted(names))
        match self._receive():
            case ["names", dict(answer)]:
                return {name: data for name, data in answer.items() if name in names}
        raise self._ended("it sent no answer")

    def ask(self, operation: str, *arguments: Any) -> Any:
        """The result of an operation on the program's objects. Raises what the program raised."""
        self.num_requests += 1
        self._send(operation, *(self._encode(argument) for argument in arguments))
        while True:
            match self._receive():
                case ["result", data, [*changes]]:
                    result = self.decode(data)
                    for change in changes:
                        match change:
                            case [int(index), new] if 0 <= index < len(arguments[1]):
                                replace(arguments[1][index], self.decode(new))
                    return result
                case ["raised", [*classes], [*parts], dict(attributes), str(reason)]:
                    given = [self.decode(part) for part in parts]
                    found = {name: self.decode(part) for name, part in attributes.items()}
                    kinds = [self._exception(kind) for kind in classes]
                    raise exception_of(operation, kinds, given, found, reason)
                case ["callback", int(number), data] if 0 <= number < len(self._callbacks):
                    self._call_back(self._callbacks[number], self.decode(data))
                case _:
                    raise self._ended("it sent no answer")

    async def _await(self, coroutine: Remote) -> Any:
        return self.ask("await", coroutine)

    def _call_back(self, function: Callable[..., Any], arguments: Any) -> None:
        try:
            self._send("returned", self._encode(function(*arguments)))
        except (Exception, CannotCarry) as error:  # a program must not choose by a call that its row is broken
            if isinstance(self.fault, CannotCarry):
                self.fault = None
            self._send("callback raised", *sent_error(error))

    def _exception(self, kind: Any) -> Any:
        match kind:
            case [str(module), str(name)]:
                return self._exceptions.get(name) or exception_class(module, name, self._names)
        return None

    def _ended(self, reason: str) -> ProgramEnded:
        self.fault = ProgramEnded(reason)
        return self.fault

    def _send(self, *message: Any) -> None:
        try:
            self._line.send(*message)
        except OSError:
            raise self._ended("its process has ended") from None

    def _receive(self) -> list[Any]:
        try:
            return self._line.receive()
        except EOFError:
            raise self._ended("its process has ended") from None
        except (ValueError, RecursionError) as error:
            raise self._ended(f"it sent no message: {reason_of(error)}") from None

    def _encode(self, value: Any) -> Any:
        return encode(value, self._refer)

    def require_that_it_travels(self, value: Any) -> None:
        """Raises CannotCarry if the program cannot have made a value that equals this one of the test."""
        encode(value, lambda inner: [] if callable(inner) else self._refer(inner, "compares the program's result with"))

    def _refer(self, value: Any, does: str = "gives the program") -> list[Any]:
        if type(value) is Remote:
            return ["object", object.__getattribute__(value, "_number")]
        if id(value) in self._coroutines:
            return ["object", self._coroutines[id(value)][1]]
        value = getattr(value, "__next__", value)
        if callable(value):
            self._callbacks.append(value)
            return ["callback", len(self._callbacks) - 1]
        self.fault = CannotCarry(f"the test {does} an object of type {type(value).__name__}")
        raise self.fault

    def decode(self, data: Any) -> Any:
        try:
            return decode(data, self._resolve)
        except Exception as error:
            raise self._ended(f"it sent no value: {reason_of(error)}") from None

    def _resolve(self, reference: list[Any]) -> Any:
        match reference:
            case ["callback", int(number)]:
                return self._callbacks[number]
            case ["object", int(number)]:
                return Remote(self, number)
            case ["coroutine", int(number)]:
                coroutine = self._await(Remote(self, number))
                self._coroutines[id(coroutine)] = coroutine, number
                return coroutine
            case ["exception", str(module), str(name), str(nearest)] if issubclass(
                getattr(builtins, nearest), Exception
            ):
                known = exception_class(module, name, self._names)
                own = known or type(name, (getattr(builtins, nearest),), {})
                return self._exceptions.setdefault(name, own)
        raise ValueError(f"no value is of the kind {reference[0]!r}")


def run_tests(tests: str, receive: int, send: int, results: int) -> None:
    """Run each test in a fresh name space, and write one line of JSON for each: [verdict, reason].

    The verdict is `passed`, `raised` (by an assert, or by what the program or the test raised), `failed`, `ended` (the
    program's process has ended, so no other test can run) or `broken` (the test cannot be run on any program).

    Args:
        tests: as JSON, a list of pairs: a Python text, and the names that it uses as classes (`classes.py`).
        receive, send: the numbers of two pipes, from and to the program.
        results: the number of the pipe for the verdicts.
    """
    with os.fdopen(results, "w") as report:
        codes = []
        for test, classes in json.loads(tests):
            try:
                codes.append((compiled(test, "test"), set(classes)))
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                print(json.dumps(["broken", f"{test.strip()[:80]!r} is no Python: {reason_of(error)}"]), file=report)
                return
        program = TestedProgram(Line(receive, send))
        try:
            fault = program.load()
        except ProgramEnded as error:
            print(json.dumps(["ended", str(error)]), file=report)
            return
        for code, classes in codes:
            verdict, reason = ("failed", fault) if fault else run_test(program, code, classes)
            print(json.dumps([verdict, reason]), file=report, flush=True)
            if verdict == "ended":
                return


def run_test(program: TestedProgram, code: CodeType, classes: set[str]) -> tuple[str, str]:
    failure, before = "", program.num_requests
    try:
        found = program.globals_for(code, classes)
        found["__name__"] = "__main__"
        exec(code, found)
    except BaseException as error:
        failure = f"line {line_of(error)} of the test: {reason_of(error)}"
    if isinstance(program.fault, CannotCarry):
        return "broken", str(program.fault)
    if program.fault is not None:
        return "ended", str(program.fault)
    if failure:
        return "raised", failure
    if program.num_requests == before:
        if calls_the_program(code):
            return "failed", "it passes, but what it calls is no function of the program"
        return "broken", "it passes without using the program; a test must call the functions that it defines"
    return "passed", ""


def calls_the_program(code: CodeType) -> bool:
    """Whether a test calls a name that a program must define, or reads its attribute, independently of what this
    program defines: a test that expects an exception also passes where the name is missing, or is a number."""
    uses = []

    class Named:
        def __call__(self, *_: Any, **__: Any) -> Any:
            uses.append("call")
            raise ProgramError("called")

        def __getattr__(self, name: str) -> Any:
            uses.append(name)
            raise ProgramError("used")

    passes_with(code, lambda name: Named())
    return bool(uses)


def passes_with(code: CodeType, value_of: Callable[[str], Any]) -> bool:
    """Whether a test passes without a program, if each name that a program must define has this value."""
    names = {name for name in names_of(code) if not hasattr(builtins, name) and name not in sys.stdlib_module_names}
    try:
        exec(code, {"__name__": "__main__", **{name: value_of(name) for name in names}})
    except BaseException:  # as in the test itself
        return False
    return True
