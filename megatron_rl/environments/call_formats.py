"""The formats in which models call tools, read strictly: what a server would repair for its user, a policy must not be
rewarded for. A call counts only if its own marks close it and its arguments are complete.

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    qwen3_coder  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    glm          <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    minimax_m2   <minimax:tool_call><invoke name="add"><parameter name="a">1</parameter></invoke></minimax:tool_call>
    kimi_k2      <|tool_calls_section_begin|>
                     <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
                 <|tool_calls_section_end|>
    deepseek     <｜tool▁calls▁begin｜>
                     <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
                 <｜tool▁calls▁end｜>         V3 and R1: function<｜tool▁sep｜>add, and a block ```json
    gpt_oss      <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
    llama3       {"name": "add", "parameters": {"a": 1}}           the whole turn
    mistral      [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "123456789"}]     or, in newer models,
                 [TOOL_CALLS]add[ARGS]{"a": 1}
    nemotron     <TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>

Qwen3-Coder's is the format of Qwen3.5 and Nemotron 3, too.

White space between marks and inside JSON is free. JSON must not name a key twice, and has no NaN. A value between marks
must not have a mark of its format: nobody could say where it ends. It is a text if the tool's schema has a text there,
and JSON otherwise.

Invariants (tests/unit/environments): what the published template of a model writes of a call is read as this call; a
call that is cut off anywhere in its own marks does not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from megatron_rl.environments.call_reader import (
    STRICT,
    Fault,
    FaultKind,
    ReadCall,
    Reader,
    Schemas,
    add_argument,
    named_call,
    named_calls,
)


@dataclass(frozen=True, slots=True)
class AskedCall:
    """What a turn has written as a call."""

    start: int
    stop: int
    """Its characters, marks included."""
    is_closed: bool
    name: str = "error"
    """The tool's name, if there is no fault."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    """Why it calls nothing; empty if it does."""
    kind: FaultKind | Literal[""] = ""
    """The kind of the fault."""
    id: str = ""
    """The name that the model has given to the call; empty if its format has none."""


class CallFormat(Protocol):
    """A format of calls."""

    @property
    def reads_end(self) -> bool:
        """Whether the token that ends a turn belongs to its text."""
        ...

    @property
    def hint(self) -> str:
        """What a chat template that tells the model about the format has in its text, as a regular expression."""
        ...

    def calls(self, text: str, schemas: Schemas) -> Iterator[AskedCall]:
        """What the text of a turn has of calls, good and bad, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Marked:
    """Calls between marks.

    Example: of kimi_k2, `opening` is <|tool_call_begin|> and `section` begins with <|tool_calls_section_begin|>.
    """

    opening: str
    closing: str
    """The mark at the end of a call; empty: the end of the turn is its end."""
    read: Callable[[Reader, Schemas], list[ReadCall]]
    """Reads what follows the opening mark, up to the end."""
    hint: str
    section: tuple[str, str] = ("", "")
    """The marks around all calls of a turn. Without the last one none of them counts."""
    reads_end: bool = False

    def calls(self, text: str, schemas: Schemas) -> Iterator[AskedCall]:
        at, outer = 0, self.section[0] or self.opening
        while places := [place for mark in (outer, self.opening) if (place := text.find(mark, at)) >= 0]:
            start = min(places)
            if outer == self.opening:
                found = self._call(text, start, schemas)
            elif text.startswith(outer, start):
                found = self._section(text, start, schemas)
            else:
                *_, last = self._call(text, start, schemas)
                found = [AskedCall(start, last.stop, last.is_closed, fault=f"a call without {outer}", kind="malformed")]
            at = found[-1].stop
            yield from found

    def _call(self, text: str, start: int, schemas: Schemas) -> list[AskedCall]:
        """The call whose opening mark is here, or its list of calls, of which the last one has the place of the whole
        list."""
        reader = Reader(text, start + len(self.opening))
        try:
            calls = self.read(reader, schemas)
        except Fault as fault:
            return [self._faulty(text, start, reader.at, fault)]
        *before, last = [AskedCall(start, start, True, one.name, one.arguments, id=one.id) for one in calls]
        return [*before, replace(last, stop=reader.at)]

    def _faulty(self, text: str, start: int, at: int, fault: Fault) -> AskedCall:
        """The call, up to its own end or to the beginning of another one."""
        marks = filter(None, (self.opening, self.closing, self.section[1]))
        stop = min((place for mark in marks if (place := text.find(mark, at)) >= 0), default=len(text))
        if not self.closing:
            return AskedCall(start, stop, False, fault=str(fault), kind=fault.kind)
        if not text.startswith(self.closing, stop):
            return AskedCall(start, stop, False, fault=f"a {self.opening} without {self.closing}", kind="unclosed")
        return AskedCall(start, stop + len(self.closing), True, fault=str(fault), kind="malformed")

    def _section(self, text: str, start: int, schemas: Schemas) -> list[AskedCall]:
        """The calls of the section whose opening mark is here. Its marks belong to the first and to the last one."""
        opening, closing = self.section
        reader, found = Reader(text, start + len(opening)), list[AskedCall]()
        while text.startswith(self.opening, reader.space().at):
            found += self._call(text, reader.at, schemas)
            reader.at = found[-1].stop
        try:
            reader.require(closing)
        except Fault as fault:  # none of its calls is closed
            return [AskedCall(start, len(text), False, fault=f"a {opening} without its end: {fault}", kind=fault.kind)]
        if not found:
            return [AskedCall(start, reader.at, True, fault=f"a {opening} without a call", kind="malformed")]
        found[0] = replace(found[0], start=start)
        return [*found[:-1], replace(found[-1], stop=reader.at)]


@dataclass(frozen=True, slots=True)
class WholeTurn:
    """A turn that is one call in JSON, without marks. A JSON object that does not begin with `name` is an answer."""

    hint: str
    reads_end: bool = False

    def calls(self, text: str, schemas: Schemas) -> Iterator[AskedCall]:
        reader = Reader(text, 0).space()
        start, is_marked = reader.at, reader.takes("<|python_tag|>")
        if not is_marked and re.match(r'\{\s*"name"', text[start:]) is None and not _has_call(text[start:]):
            return
        try:
            call = named_call(reader.json(), "parameters")
            if reader.space().at < len(text):
                raise Fault("malformed", f"{text[reader.at : reader.at + 20]!r} follows the call")
        except Fault as fault:
            yield AskedCall(start, len(text), False, fault=str(fault), kind=fault.kind)
            return
        yield AskedCall(start, len(text), True, call.name, call.arguments)


def _has_call(text: str) -> bool:
    """Whether a text is JSON with a name and parameters in another form, as servers read it: a list, or other keys."""
    try:
        value = STRICT.decode(text.strip())
    except (ValueError, RecursionError):
        return False
    found = value if isinstance(value, list) else [value]
    return any(isinstance(one, dict) and {"name", "parameters"} <= one.keys() for one in found)


@dataclass(frozen=True, slots=True)
class Channels:
    """The messages of a turn of gpt-oss."""

    hint: str
    reads_end: bool = True

    def calls(self, text: str, schemas: Schemas) -> Iterator[AskedCall]:
        stop = 0
        for found in HEADER.finditer(text):
            if found.start() < stop:  # it is a text in the arguments of a call
                continue
            channel = (found[2] or "").strip()
            to = re.search(r"to=(\S+)", f"{found[1]} {channel}")
            if to is None:
                continue
            reader = Reader(text, found.end())
            try:
                if not channel.startswith("commentary"):
                    raise Fault("malformed", f"a call must be in the channel commentary, and not in {channel!r}")
                if not to[1].startswith("functions."):
                    raise Fault("malformed", f"a call must be to functions.NAME, and not to {to[1]!r}")
                call = ReadCall(to[1].removeprefix("functions."), reader.arguments())
                reader.space().require("<|call|>")
            except Fault as fault:
                marks = ("<|call|>", "<|end|>", "<|start|>", "<|return|>")
                stop = min((place for mark in marks if (place := text.find(mark, reader.at)) >= 0), default=len(text))
                yield AskedCall(found.start(), stop, False, fault=str(fault), kind=fault.kind)
                continue
            stop = reader.at
            yield AskedCall(found.start(), stop, True, call.name, call.arguments)
        if (header := UNFINISHED.search(text, stop)) and "to=" in header[0]:
            yield AskedCall(header.start(), len(text), False, fault="<|message|> is missing", kind="unclosed")


UNFINISHED = re.compile(r"(?:\A|<\|start\|>assistant)[^<]*<\|channel\|>[^<]*(?:<\|constrain\|>[^<]*)?(?:<\|call\|>)?\Z")
"""The header of a message that the turn ends with."""
HEADER = re.compile(
    r"(?:\A|<\|start\|>assistant)([^<]*)(?:<\|channel\|>([^<]*))?(?:<\|constrain\|>[^<]*)?<\|message\|>"
)


def _hermes(reader: Reader, schemas: Schemas) -> list[ReadCall]:
    call = named_call(reader.json())
    if reader.space().at < len(reader.text) and not reader.text.startswith(("<", "</tool_call>"), reader.at):
        raise Fault("malformed", "the call is not JSON: more follows it")
    reader.require("</tool_call>")
    return [call]


def _qwen3_coder(reader: Reader, schemas: Schemas) -> list[ReadCall]:
    marks = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=")
    reader.space().require("<function=")
    call = ReadCall(reader.name(), {})
    reader.require(">")
    while reader.space().takes("<parameter="):
        key = reader.name()
        reader.require(">")
        text = reader.until("</parameter>", *marks)
        add_argument(call, key, text.removeprefix("\n").removesuffix("\n"), schemas)
    reader.require("</function>")
    reader.space().require("</tool_call>")
    return [call]


def _glm(reader: Reader, schemas: Schemas) -> list[ReadCall]:
    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>")
    call = ReadCall(reader.space().name(), {})
    while reader.space().takes("<arg_key>"):
        key = reader.until("</arg_key>", *marks)
        reader.space().require("<arg_value>")
        add_argument(call, key.strip(), reader.until("</arg_value>", *marks), schemas)
    reader.require("</tool_call>")
    return [call]


def _minimax_m2(reader: Reader, schemas: Schemas) -> list[ReadCall]:
    marks = ("<minimax:tool_call>", "</minimax:tool_call>", "<invoke ", "</invoke>", "<parameter ")
    call = ReadCall(reader.name(), {})
    reader.require('">')
    while reader.space().takes('<parameter name="'):
        key = reader.name()
        reader.require('">')
        add_argument(call, key, reader.until("</parameter>", *marks), schemas)
    reader.require("</invoke>")
    return [call]


def _kimi_k2(reader: Reader, schemas: Schemas) -> list[ReadCall]:
    given = reader.until("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>").strip()
    found = re.fullmatch(r"functions\.(.+):\d+", given)
    if found is None:
        raise Fault("malformed", f"a call must begin with functions.NAME:NUMBER, but there is {given[:40]!r}")
    call = ReadCall(found[1], reader.arguments(), given)
    reader.space().require("<|tool_call_end|>")
    return [call]


def _deepseek(reader: Reader, schemas: Schemas) -> list[ReadCall]:
    name = reader.until("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>").strip()
    is_fenced = name == "function"  # DeepSeek-V3 and R1
    if is_fenced:
        name = reader.until("\n", "<｜tool▁call▁end｜>").strip()
        reader.require("```json")
    call = ReadCall(name, reader.arguments())
    if is_fenced:
        reader.space().require("```")
    reader.space().require("<｜tool▁call▁end｜>")
    return [call]


def _nemotron(reader: Reader, schemas: Schemas) -> list[ReadCall]:
    calls = named_calls(reader.json())
    reader.space().require("</TOOLCALL>")
    return calls


def _mistral(reader: Reader, schemas: Schemas) -> list[ReadCall]:
    if reader.space().text.startswith("[", reader.at):
        calls = named_calls(reader.json(), "id")
    else:
        name, id = reader.name(), ""
        if reader.takes("[CALL_ID]"):  # Mistral Small 3.2
            id = reader.until("[ARGS]", "[TOOL_CALLS]")
        else:
            reader.require("[ARGS]")
        calls = [ReadCall(name, reader.arguments(), id)]
    if reader.space().at < len(reader.text) and not reader.text.startswith("[TOOL_CALLS]", reader.at):
        raise Fault("malformed", f"{reader.text[reader.at : reader.at + 20]!r} follows the call")
    return calls


FORMATS: dict[str, CallFormat] = {
    "hermes": Marked("<tool_call>", "</tool_call>", _hermes, r'<tool_call>\s*\{\s*"name"'),
    "qwen3_coder": Marked("<tool_call>", "</tool_call>", _qwen3_coder, r"<function="),
    "glm": Marked("<tool_call>", "</tool_call>", _glm, r"<arg_key>"),
    "minimax_m2": Marked(
        '<invoke name="',
        "</invoke>",
        _minimax_m2,
        r"<minimax:tool_call>",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "kimi_k2": Marked(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        _kimi_k2,
        r"<\|tool_calls_section_begin\|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "deepseek": Marked(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        _deepseek,
        r"<｜tool▁calls▁begin｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "gpt_oss": Channels(r"<\|channel\|>|go to the commentary channel"),
    "llama3": WholeTurn(r'\{"name": function name, "parameters"'),
    "mistral": Marked("[TOOL_CALLS]", "", _mistral, r"\[TOOL_CALLS\]"),
    "nemotron": Marked("<TOOLCALL>", "</TOOLCALL>", _nemotron, r"<TOOLCALL>"),
}
"""The formats, by the names of `rollout.environment.format`."""
