"""Reads the calls of tools in a text, mark by mark, without a repair.

Invariants (tests/unit/environments): JSON with a key twice, NaN, Infinity or 1e999 is none; a value whose end is in
doubt is a fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool, by its name."""
FaultKind = Literal["unclosed", "malformed"]
NAME = re.compile(r"[^\s<>=\"\[\]{}]+")
SPACE = re.compile(r"\s*")
PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""Qwen3.5's template writes them in the place of JSON's."""


class Fault(ValueError):
    """A call that cannot be read."""

    def __init__(self, kind: FaultKind, what: str) -> None:
        super().__init__(what)
        self.kind: FaultKind = kind


@dataclass(slots=True)
class ReadCall:
    """A call that was read."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"{text} is too large a number")
    return number


STRICT = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_no_number, parse_float=_finite)


@dataclass(slots=True)
class Reader:
    """A place in the text of a turn."""

    text: str
    at: int

    def space(self) -> Reader:
        self.at = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        return self

    def takes(self, mark: str) -> bool:
        """Whether the mark is here; if so, the place is after it."""
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) * found
        return found

    def require(self, mark: str) -> None:
        """
        Raises:
            Fault: the mark is not here.
        """
        if not self.takes(mark):
            rest = self.text[self.at :]
            if not rest or mark.startswith(rest):
                raise Fault("unclosed", f"{mark} is missing")
            raise Fault("malformed", f"there must be {mark}, but there is {rest[:20]!r}")

    def until(self, mark: str, *others: str) -> str:
        """The text up to the mark, after which the place is then.

        Args:
            others: the other marks of the format, which the text must not have.

        Raises:
            Fault: the mark does not follow, or another one comes first.
        """
        stop = self.text.find(mark, self.at)
        if stop < 0:
            raise Fault("unclosed", f"{mark} is missing")
        found = self.text[self.at : stop]
        if other := next((other for other in others if other in found), None):
            raise Fault("malformed", f"{mark} is missing before {other}")
        self.at = stop + len(mark)
        return found

    def name(self) -> str:
        """
        Raises:
            Fault: there is no name.
        """
        found = NAME.match(self.text, self.at)
        if found is None:
            raise Fault("malformed", "the name of the tool is missing")
        self.at = found.end()
        return found[0]

    def json(self) -> Any:
        """
        Raises:
            Fault: there is no JSON, or it is not complete.
        """
        begin = self.space().at
        try:
            value, self.at = STRICT.raw_decode(self.text, begin)
        except json.JSONDecodeError as error:
            raise Fault("malformed", f"the call is not JSON: {error.msg} at character {error.pos - begin}") from None
        except (ValueError, RecursionError) as error:  # a key twice, numbers of thousands of digits, deep lists
            raise Fault("malformed", f"the call is not JSON: {error}") from None
        return value

    def arguments(self) -> dict[str, Any]:
        """
        Raises:
            Fault: there is no JSON object.
        """
        return object_of(self.json())


def object_of(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault("malformed", "the arguments of a call must be a JSON object")
    return value


def named_call(value: Any, arguments: str = "arguments", optional: str = "") -> ReadCall:
    """A call whose name is in its JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Fault("malformed", f'a call must be {{"name": ..., "{arguments}": {{...}}}}')
    if others := [key for key in value if key not in ("name", arguments, optional)]:
        raise Fault("malformed", f'a call must be {{"name": ..., "{arguments}": {{...}}}}, without {others[0]!r}')
    if not isinstance(id := value.get(optional, ""), str):
        raise Fault("malformed", f"the {optional} of a call must be a text, and not {id!r}")
    return ReadCall(value["name"], object_of(value.get(arguments, {})), id)


def named_calls(value: Any, optional: str = "") -> list[ReadCall]:
    if not isinstance(value, list) or not value:
        raise Fault("malformed", 'calls must be a list, [{"name": ..., "arguments": {...}}]')
    return [named_call(one, optional=optional) for one in value]


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """The value that a text between marks says. A wrong one stays a text, which the schema then refuses."""
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value, end = STRICT.raw_decode(text.strip())
        if end == len(text.strip()) and not (isinstance(value, str) and "string" in types):
            return value
    except (ValueError, RecursionError):
        pass
    return text if "string" in types else PYTHON_WORDS.get(text.strip(), text)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names itself; those of None are left out. A parameter that is not known has a text."""
    named = schema.get("type", ())
    found = {named} if isinstance(named, str) else set(named)
    for one in schema.get("anyOf", ()):
        found |= _types(one)
    return (found - {"null"}) or ({"string"} if not schema or "enum" in schema else set())


def _parameter(schemas: Schemas, tool: str, name: str) -> Mapping[str, Any]:
    given: Mapping[str, Any] = schemas.get(tool, {}).get("properties", {}).get(name, {})
    return given


def add_argument(call: ReadCall, key: str, text: str, schemas: Schemas) -> None:
    if key in call.arguments:
        raise Fault("malformed", f"the argument {key!r} is given twice")
    call.arguments[key] = _typed(text, _parameter(schemas, call.name, key))
