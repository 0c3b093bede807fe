"""What bash makes of a word: quotes are removed, and variables and arithmetic are replaced by their values.

No command is run. A part that only a command could give, a form that is not read here, and a variable that is not set
leave a `Problem` in the word, which the reader of the word reports if the word matters.

Invariant (tests/unit/tools): a word whose text is not known has a problem, and so has all that is made of it.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from glob import escape
from pathlib import PurePosixPath

from megatron_rl.migrate.verl.arithmetic import number
from megatron_rl.migrate.verl.lexer import Lexer, RawWord, piece_size

NAME = re.compile(r"[A-Za-z_]\w*")
ALL_ELEMENTS = re.compile(r"\$(?:\{([A-Za-z_]\w*)\[([@*])\](?:(:?[-+])(.*))?\}|([@*])|\{([@*])\}|\{@:1\})", re.DOTALL)
CHANGED_IN_PLACE = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%&|^]?=(?!=)|<<=|>>=)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
SHORT = re.compile(r"[A-Za-z_]\w*|[@*#?$!0-9-]")
PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[@*#?!$0-9-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a value is not known. Variables that are not set are an error of the script; the others need a shell."""

    text: str
    unset: tuple[str, ...] = ()
    """The names of variables that are not set."""

    @property
    def is_unset(self) -> bool:
        return bool(self.unset)

    def and_also(self, other: Problem | None) -> Problem:
        """Both problems, if both are variables that are not set; otherwise the first one."""
        if other is None or not self.unset or set(other.unset) <= set(self.unset):
            return self
        return Problem(f"{self.text}\n{other.text}", (*self.unset, *other.unset))


@dataclass(slots=True)
class Word:
    """An expanded word. With a problem its text is incomplete."""

    text: str = ""
    problem: Problem | None = None

    def add(self, other: Word) -> None:
        self.text += other.text
        self.problem = self.problem.and_also(other.problem) if self.problem else other.problem


Value = Word | list[Word]
"""The value of a variable: a text, or an array."""


@dataclass(slots=True)
class Variables:
    """The variables of a script. A name that is not here is not set."""

    values: dict[str, Value] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    """The names that the user has given, which the script does not change."""
    arguments: list[Word] | None = None
    """The arguments of the function that is followed; None outside of functions, where `$1` is a variable."""
    required: list[Problem] = field(default_factory=list)
    """The variables without which the script ends, by `${NAME:?}`."""

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Variables:
        return cls({name: Word(text) for name, text in texts.items()}, frozenset(texts))

    def expand(self, raw: RawWord) -> list[Word]:
        """The words that bash passes for a written word: none, one or, from an array or unquoted text, several."""
        fields: list[Word] = []
        current: Word | None = None
        pieces = list(_pieces(raw.text, raw.line))
        if re.search(r"\{.*(,|\.\.).*\}", "".join(one if len(one) == 1 else "_" for one in pieces)):
            return [_unknown(raw.text, raw.line)]
        for piece in pieces:
            is_quoted, found = piece[0] == '"', ALL_ELEMENTS.fullmatch(piece)
            array = None
            if is_quoted or (found and found[3]):
                array = self._array(piece[1:-1] if is_quoted else piece, raw.line, is_quoted=is_quoted)
            if array is not None:
                if array:
                    current = current or Word()
                    current.add(array[0])
                    for one in array[1:]:
                        fields.append(current)
                        current = Word(one.text, one.problem)
            elif piece[0] == "$" and len(piece) > 1:
                current = self._split(piece, raw.line, fields, current)
            else:
                current = current or Word()
                current.add(self._quoted(piece, raw.line))
        if current is not None:
            fields.append(current)
        return fields

    def text(self, text: str, line: int) -> Word:
        """A text as it stands in double quotes, or to the right of `=`, where nothing is split into words."""
        whole = Word()
        for piece in _pieces(text, line):
            is_quoted = piece[0] in "'\"\\" or len(piece) == 1
            whole.add(self._quoted(piece, line) if is_quoted else self.substitute(piece, line))
        return whole

    def pattern(self, text: str, line: int) -> Word:
        """A text as a pattern of `case` and `[[ ... ]]`: what is quoted stands for itself."""
        whole = Word()
        for piece in _pieces(text, line):
            if piece[0] in "'\"\\":
                quoted = self._quoted(piece, line)
                whole.add(Word(escape(quoted.text), quoted.problem))
            else:
                whole.add(self.substitute(piece, line) if piece[0] in "$`" else Word(piece))
        return whole

    def _split(self, piece: str, line: int, fields: list[Word], current: Word | None) -> Word | None:
        """Add an unquoted substitution, which white space splits into words; returns the word that goes on."""
        array = self._array(piece, line)
        found = array if array is not None else [self.substitute(piece, line)]
        for place, one in enumerate(found):
            parts = one.text.split() or ([""] if one.problem else [])
            if current is not None and (place or one.text[:1].isspace()):
                fields.append(current)
                current = None
            for index, part in enumerate(parts):
                if index and current is not None:
                    fields.append(current)
                    current = None
                current = current or Word()
                current.add(Word(part, one.problem))
            if current is not None and one.text[-1:].isspace():
                fields.append(current)
                current = None
        return current

    def _quoted(self, piece: str, line: int) -> Word:
        """A quoted part or a plain character."""
        if piece[0] == "'":
            return Word(piece[1:-1])
        if piece[0] == '"':
            return self._in_double_quotes(piece[1:-1], line)
        if piece[0] == "\\":
            return Word("" if piece[1:] == "\n" else piece[1:])
        return self.substitute(piece, line) if piece[0] == "`" else Word(piece)

    def _in_double_quotes(self, text: str, line: int) -> Word:
        whole, place = Word(), 0
        while place < len(text):
            char = text[place]
            if char == "\\":
                after = text[place + 1 : place + 2]
                whole.add(Word({"\n": ""}.get(after, after) if after in '$`"\\\n' else char + after))
                place += 2
                continue
            is_whole = char == "`" or text[place : place + 2] in ("${", "$(")
            size = piece_size(text, place, line) if is_whole else 1
            piece = text[place : place + size]
            place += size
            if piece == "$" and (found := SHORT.match(text, place)):
                piece, place = piece + found[0], found.end()
            whole.add(self.substitute(piece, line) if len(piece) > 1 and char in "$`" else Word(piece))
        return whole

    def _array(self, piece: str, line: int, *, is_quoted: bool = False) -> list[Word] | None:
        """The elements of `${NAME[@]}`, or of `$@`, which is empty because nobody has started the script."""
        found = ALL_ELEMENTS.fullmatch(piece)
        if found is None:
            return None
        name, mark, change, argument, *_ = found.groups()
        if name is None:
            elements = self.arguments or []
        else:
            value = self.values.get(name, [])
            elements = value if isinstance(value, list) else [value]
            if name in self.fixed:
                elements = [Word(one) for word in elements for one in shlex.split(word.text)]
        if change is not None and (change[-1] == "+") == bool(elements):
            return [word for one in _words(argument, line) for word in self.expand(one)]
        if is_quoted and "*" in (mark, found[5], found[6]) and elements:
            whole = Word()
            for number, one in enumerate(elements):
                whole.add(Word(" " * bool(number) + one.text, one.problem))
            return [whole]
        return [] if change is not None and change[-1] == "+" else elements

    def substitute(self, piece: str, line: int) -> Word:
        """The value of `$NAME`, `${...}`, `$((...))`, or, with a problem, of `$(...)` and backticks."""
        if piece.startswith("$((") and piece.endswith("))"):
            return self.arithmetic(piece[3:-2], line)
        if piece[0] == "`" or piece.startswith("$("):
            command = piece[1:-1] if piece[0] == "`" else piece[2:-1]
            return self._command(command.strip(), piece, line)
        if piece[0] in "<>" or (piece.startswith("$'") and "\\" in piece):
            return _unknown(piece, line)
        if not piece.startswith("${"):
            return Word(piece[2:-1]) if piece.startswith("$'") else self._short(piece, line)
        found = PARAMETER.fullmatch(piece[2:-1])
        if found is None or (found[4] and (found[1] or found[2] in "?$!-")):
            return _unknown(piece, line)
        length, name, index, change = found.groups()
        if length or index in ("@", "*"):
            if change or (name not in self.values and not index):
                return _unknown(piece, line) if change else self._unset(name, line)
            return _joined(self.values.get(name), is_length=bool(length), is_array=bool(index))
        plain = self._variable(name, line, index)
        return self._changed(plain, change, piece, line) if change else plain

    def _short(self, piece: str, line: int) -> Word:
        return self._variable(piece[1:], line) if len(piece) > 1 else Word(piece)

    def _variable(self, name: str, line: int, index: str | None = None) -> Word:
        if name in ("@", "*"):
            return Word(" ".join(one.text for one in self.arguments or ()))
        if name == "#":
            return Word(str(len(self.arguments or ())))
        if name in "?$!-":
            return Word(problem=Problem(f"line {line}: ${name} needs a shell, which is not run"))
        if name.isdigit() and self.arguments is not None:
            number = int(name) - 1
            return self.arguments[number] if 0 <= number < len(self.arguments) else self._unset(name, line)
        value = self.values.get(name)
        if isinstance(value, list):
            place = self.arithmetic(index or "0", line)
            if place.problem is not None or not place.text.isdigit():
                return Word(problem=place.problem) if place.problem else _unknown(f"${{{name}[{index}]}}", line)
            number = int(place.text)
            return value[number] if number < len(value) else self._unset(f"{name}[{number}]", line)
        return value if value is not None else self._unset(name, line)

    def _unset(self, name: str, line: int) -> Word:
        what = f"the argument ${name} of the script" if name.isdigit() else f"the variable {name}"
        return Word(problem=Problem(f"line {line}: {what} is not set; give it with --set {name}=VALUE", (name,)))

    def _command(self, command: str, piece: str, line: int) -> Word:
        if command == "pwd" and "PWD" in self.values:
            return self._variable("PWD", line)
        if (found := re.fullmatch(r"(basename|dirname)\s+(\S+)", command)) and not set(command) & set("|;&`("):
            word = Word()
            for one in self.expand(RawWord(found[2], line)):
                word.add(one)
            path = PurePosixPath(word.text)
            return Word(path.name if found[1] == "basename" else str(path.parent), word.problem)
        if (found := re.fullmatch(r"date\s+['\"]?\+([%\w.:-]+)['\"]?", command)) is not None:
            return Word(time.strftime(found[1]))
        return Word(problem=Problem(f"line {line}: {' '.join(piece.split())} needs a shell, which is not run"))

    def _changed(self, plain: Word, change: str, piece: str, line: int) -> Word:
        """`${NAME...}` with what follows the name."""
        is_unset = plain.problem is not None and plain.problem.is_unset
        mark, argument = (change[:2], change[2:]) if change[:2] in (":-", ":=", ":+", ":?") else (change[0], change[1:])
        is_empty = is_unset or (mark[0] == ":" and not plain.text and plain.problem is None)
        if mark in (":-", ":=", "-", "="):
            found = self.text(argument, line) if is_empty else plain
            if is_empty and mark[-1] == "=" and (name := NAME.match(piece, 2)):
                self.values[name[0]] = found
            return found
        if mark in (":+", "+") and (is_empty or plain.problem is None):
            return Word() if is_empty else self.text(argument, line)
        if mark in (":?", "?") and is_empty:
            missing = self._unset(piece[2:].partition(mark)[0], line)
            self.required += [missing.problem] if missing.problem else []
            return missing
        if mark in (":?", "?") or plain.problem is not None:
            return plain
        if (edited := _edited(plain.text, change)) is not None:
            return Word(edited)
        if mark in ("%", "#"):
            pattern = self.text(argument.lstrip(mark), line)
            return Word(_stripped(plain.text, mark, pattern.text, argument[:1] == mark), pattern.problem)
        if mark == "/":
            old, _, new = argument.lstrip("/").partition("/")
            times = 0 if argument[:1] == "/" else 1
            replacement, pattern = self.text(new, line), self.text(old, line)
            text = re.sub(_pattern(pattern.text), lambda _: replacement.text, plain.text, count=times)
            return Word(text, pattern.problem or replacement.problem)
        return _unknown(piece, line)

    def arithmetic(self, text: str, line: int) -> Word:
        """The value of `$((text))`, in integers."""
        word = self._in_double_quotes(text, line)
        if word.problem is not None:
            return word
        try:
            return Word(str(number(word.text, self._of_arithmetic)))
        except (SyntaxError, KeyError, TypeError, ZeroDivisionError, RecursionError) as error:
            if isinstance(error, KeyError):
                inner = self.values.get(str(error.args[0]))
                return inner if isinstance(inner, Word) else self._unset(str(error.args[0]), line)
            unknown = _unknown(f"(({text}))", line)
            for found in CHANGED_IN_PLACE.finditer(text):
                self.values[found[1] or found[2]] = unknown
            return unknown

    def _of_arithmetic(self, name: str) -> str:
        """The text of a variable; a KeyError if it is not known."""
        value = self.values.get(name)
        if not isinstance(value, Word) or value.problem is not None:
            raise KeyError(name)
        return value.text


def _pieces(text: str, line: int) -> Iterator[str]:
    """The parts of a written word: quoted parts, substitutions and plain characters."""
    place = 0
    while place < len(text):
        piece = text[place : place + piece_size(text, place, line)]
        place += len(piece)
        if piece == "$" and (found := SHORT.match(text, place)):
            piece, place = piece + found[0], found.end()
        yield piece


def _words(text: str, line: int) -> list[RawWord]:
    return [token for token in Lexer(text, line).tokens() if isinstance(token, RawWord)]


def _unknown(piece: str, line: int) -> Word:
    return Word(problem=Problem(f"line {line}: {' '.join(piece.split())} is a form of bash that is not read here"))


def _joined(value: Value | None, *, is_length: bool, is_array: bool) -> Word:
    """`${#NAME}`, `${#NAME[@]}`, or all elements of an array as one text."""
    elements = value if isinstance(value, list) else [value] if value else []
    whole = Word()
    for one in elements:
        whole.add(Word(f" {one.text}", one.problem))
    if is_length:
        whole.text = str(len(elements) if is_array else len(elements[0].text) if elements else 0)
    return Word(whole.text.removeprefix(" "), whole.problem)


def _edited(text: str, change: str) -> str | None:
    """The text in another case, or a part of it by numbers; None if the change is another one."""
    if change in (",,", "^^", ",", "^"):
        changed = text.lower() if change[0] == "," else text.upper()
        return changed if len(change) == 2 else changed[:1] + text[1:]
    if (sliced := re.fullmatch(r":\s*(\d+)(?::(\d+))?", change)) is not None:
        start = int(sliced[1])
        return text[start : start + int(sliced[2])] if sliced[2] else text[start:]
    return None


def matches(text: str, pattern: str) -> bool:
    """Whether a pattern of the shell matches the whole text."""
    return re.fullmatch(_pattern(pattern), text) is not None


def _pattern(glob: str) -> str:
    """The regular expression of a pattern of the shell, without an anchor."""
    return translate(glob).removesuffix(r"\Z").removesuffix(r"\z")


def _stripped(text: str, mark: str, glob: str, is_longest: bool) -> str:
    """`text` without the shortest or the longest end (`%`) or beginning (`#`) that the pattern matches."""
    pattern = re.compile(_pattern(glob))
    sizes = range(len(text) + 1)
    for size in reversed(sizes) if is_longest else sizes:
        part = text[len(text) - size :] if mark == "%" else text[:size]
        if pattern.fullmatch(part):
            return text[: len(text) - size] if mark == "%" else text[size:]
    return text
