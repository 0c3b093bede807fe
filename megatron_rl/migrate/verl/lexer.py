"""The words and operators of a shell script, by bash's rules of quoting. Nothing is expanded here.

Invariants (tests/unit/migrate): a backslash at the end of a line joins it to the next one, except in a comment; a
comment begins at a `#` that begins a word; redirections and here-documents are left out, and the command before them
stays.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", ";", "&", "|", "(", ")", "\n")
ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")


ADVICE = "give the words that `bash -x` prints for the command in place of the script"


class ScriptError(ValueError):
    """A script cannot be read; the text names the line and says what to do."""


@dataclass(frozen=True, slots=True)
class RawWord:
    """A word as it is written, quotes included; or an array `NAME=(...)` with the words between the brackets."""

    text: str
    line: int
    array: tuple[RawWord, ...] | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    text: str
    line: int


ENDS = {"if": "fi", "for": "done", "case": "esac", "{": "}", "(": ")"}
"""The words that open a statement -> the words that end it."""


@dataclass(slots=True)
class Cursor:
    """A place among tokens, and what stands there."""

    tokens: Sequence[RawWord | Operator] = ()
    place: int = 0

    def _keyword(self) -> str:
        """The text of the word at this place; empty if there is an operator or an array."""
        token = self.tokens[self.place] if self.place < len(self.tokens) else None
        return token.text if isinstance(token, RawWord) and token.array is None else ""

    def _is(self, ahead: int, *texts: str) -> bool:
        token = self.tokens[self.place + ahead] if self.place + ahead < len(self.tokens) else None
        return isinstance(token, Operator) and token.text in texts

    def _at(self, *texts: str) -> bool:
        return self._is(0, *texts)

    def _take(self) -> RawWord | Operator:
        if self.place == len(self.tokens):
            self._fail()
        self.place += 1
        return self.tokens[self.place - 1]

    def _expect(self, text: str, opened: str, line: int) -> None:
        if self.place == len(self.tokens):
            raise ScriptError(f"line {line}: the `{opened}` has no `{ENDS[opened]}`; complete the script")
        if not self._at(text) and self._keyword() != text:
            self._fail()
        self.place += 1

    def _skip_lines(self) -> None:
        while self._at("\n"):
            self.place += 1

    def _fail(self) -> NoReturn:
        token = self.tokens[min(self.place, len(self.tokens) - 1)]
        shown = "the end of the line" if token.text == "\n" else f"`{token.text}`"
        raise ScriptError(f"line {token.line}: {shown} is not read at this place; {ADVICE}")


@dataclass(slots=True)
class Lexer:
    """Reads the tokens of a script one after the other."""

    text: str
    line: int = 1
    place: int = 0
    heredocs: list[str] = field(default_factory=list)
    comments: list[int] = field(default_factory=list)
    """The lines that have a comment of their own directly after a line that ends with a backslash."""
    in_test: bool = False
    """Whether the place is inside of `[[ ... ]]`, where `<` and `>` compare."""

    def tokens(self) -> list[RawWord | Operator]:
        found: list[RawWord | Operator] = []
        while (token := self._next()) is not None:
            found.append(token)
        return found

    def _next(self) -> RawWord | Operator | None:
        continued = False
        while self.place < len(self.text):
            rest = self.text[self.place :]
            if rest[0] in " \t\r":
                self.place += 1
            elif rest.startswith(("\\\n", "\\\r\n")):
                self._forward(rest.index("\n") + 1)
                continued = True
            elif rest[0] == "#":
                if continued:
                    self.comments.append(self.line)
                self._forward(len(rest.partition("\n")[0]))
            elif rest.startswith("((") and not self.in_test:
                return self._arithmetic()
            elif not self.in_test and (redirection := re.match(r"\d*(?:<<<|<<-?|[<>]&?\|?>?|&>>?)(?!\()", rest)):
                self._skip_redirection(redirection)
            elif operator := next((one for one in OPERATORS if rest.startswith(one)), None):
                token = Operator(operator, self.line)
                self._forward(len(operator))
                if operator == "\n":
                    self._skip_heredocs()
                return token
            else:
                return self._word()
        return None

    def _forward(self, size: int) -> None:
        self.line += self.text.count("\n", self.place, self.place + size)
        self.place += size

    def _skip_redirection(self, found: re.Match[str]) -> None:
        if document := HEREDOC.match(self.text, self.place):
            self.heredocs.append(document[2])
            self._forward(len(document[0]))
            return
        self._forward(len(found[0]))
        while self.text[self.place : self.place + 1] in (" ", "\t"):
            self.place += 1
        if self.text[self.place : self.place + 1] not in ("", "\n", ";", "&"):
            self._word()

    def _skip_heredocs(self) -> None:
        for end in self.heredocs:
            closing = re.compile(rf"^\t*{end}[ \t]*$", re.MULTILINE).search(self.text, self.place)
            if closing is None:
                raise ScriptError(f"line {self.line}: the here-document does not end with {end}; complete the script")
            self._forward(closing.end() - self.place)
        self.heredocs.clear()

    def _arithmetic(self) -> RawWord:
        """`((...))` as one word."""
        line, end = self.line, _end_of_brackets(self.text, self.place, self.line)
        if end < 0:
            raise ScriptError(f"line {line}: (( is not closed; complete the script")
        text = self.text[self.place : end + 1]
        self._forward(len(text))
        return RawWord(text, line)

    def _word(self) -> RawWord:
        start, line = self.place, self.line
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == "(" and ARRAY.match(self.text[start : self.place]):
                return self._array(self.text[start : self.place], line)
            if char in " \t\n;&|<>()":
                break
            if self.text.startswith("\\\n", self.place) and self.text[self.place + 2 : self.place + 3] in " \t\n#":
                break
            self._piece()
        if self.place == start:  # a character that begins no word
            self._forward(1)
        text = self.text[start : self.place]
        self.in_test = text == "[[" or (self.in_test and text != "]]")
        return RawWord(text, line)

    def _piece(self) -> None:
        """Step over one character, or over a quoted part or a substitution as a whole."""
        self._forward(piece_size(self.text, self.place, self.line))

    def _array(self, name: str, line: int) -> RawWord:
        self._forward(1)
        words: list[RawWord] = []
        while (token := self._next()) is not None:
            if isinstance(token, RawWord):
                words.append(token)
            elif token.text == ")":
                return RawWord(name, line, tuple(words))
        raise ScriptError(f"line {line}: the array {name.rstrip('=+')} has no closing bracket; complete the script")


def piece_size(text: str, place: int, line: int) -> int:
    """The number of characters of the piece of a word at `place`: a quoted part, a substitution, or one character.

    Raises:
        ScriptError: a quote or a bracket is not closed.
    """
    rest = text[place : place + 2]
    if rest[0] == "\\":
        return min(2, len(text) - place)
    if rest == "$'":
        return 1 + piece_size(text, place + 1, line)
    if rest[0] == "'":
        end = text.find("'", place + 1)
    elif rest[0] == "`":
        end = text.find("`", place + 1)
    elif rest[0] == '"':
        end = _end_of_double_quotes(text, place, line)
    elif rest in ("${", "$("):
        end = _end_of_brackets(text, place + 1, line)
    else:
        return 1
    if end < 0:
        raise ScriptError(f"line {line}: {rest[0]} is not closed; complete the script")
    return end + 1 - place


def _end_of_double_quotes(text: str, place: int, line: int) -> int:
    place += 1
    while place < len(text):
        if text[place] == '"':
            return place
        inside = text[place] in "\\`" or text[place : place + 2] in ("${", "$(")
        place += piece_size(text, place, line) if inside else 1
    return -1


def _end_of_brackets(text: str, place: int, line: int) -> int:
    """The place of the bracket that closes the one at `place`."""
    opening, closing = text[place], {"{": "}", "(": ")"}[text[place]]
    place += 1
    while place < len(text):
        if text[place] == closing:
            return place
        size = piece_size(text, place, line)
        if text[place] == opening and size == 1:
            size = _end_of_brackets(text, place, line) + 1 - place
            if size <= 0:
                return -1
        place += size
    return -1
