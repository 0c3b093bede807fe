"""What bash makes of a word: quotes are removed, and variables and arithmetic are replaced by their values.

No command is run. A part that only a command could give, and a variable that is not set, leave a `Problem` in the word,
which the reader of the word reports if the word matters.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import PurePosixPath

from megatron_rl.tools.verl.lexer import RawWord, ScriptError, piece_size

NAME = re.compile(r"[A-Za-z_]\w*")
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

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Variables:
        return cls({name: Word(text) for name, text in texts.items()})

    def expand(self, raw: RawWord) -> list[Word]:
        """The words that bash passes for a written word: none, one or, from an array or unquoted text, several."""
        fields: list[Word] = []
        current: Word | None = None
        text, place = raw.text, 0
        while place < len(text):
            piece = text[place : place + piece_size(text, place, raw.line)]
            place += len(piece)
            if piece == "$" and (found := re.compile(r"[A-Za-z_]\w*|[@*#?$0-9]").match(text, place)):
                piece, place = piece + found[0], found.end()
            if piece[0] == '"' and (array := self._array(piece[1:-1], raw.line)) is not None:
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
        whole, place = Word(), 0
        while place < len(text):
            size = piece_size(text, place, line)
            piece = text[place : place + size]
            place += size
            if piece == "$" and (found := re.compile(r"[A-Za-z_]\w*|[@*#?$0-9]").match(text, place)):
                piece, place = piece + found[0], found.end()
            whole.add(self.substitute(piece, line) if piece[0] in "$`" else self._quoted(piece, line))
        return whole

    def _split(self, piece: str, line: int, fields: list[Word], current: Word | None) -> Word | None:
        """Add an unquoted substitution, which white space splits into words; returns the word that goes on."""
        array = self._array(piece, line)
        found = array if array is not None else [self.substitute(piece, line)]
        for number, one in enumerate(found):
            parts = one.text.split() or ([""] if one.problem else [])
            if current is not None and (number or one.text[:1].isspace()):
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
            size = piece_size(text, place, line) if char in "$`" else 1
            piece = text[place : place + size]
            place += size
            if piece == "$" and (found := re.compile(r"[A-Za-z_]\w*|[@*#?$0-9]").match(text, place)):
                piece, place = piece + found[0], found.end()
            whole.add(self.substitute(piece, line) if len(piece) > 1 and char in "$`" else Word(piece))
        return whole

    def _array(self, piece: str, line: int) -> list[Word] | None:
        """The elements of `${NAME[@]}`, or of `$@`, which is empty because nobody has started the script."""
        if piece in ("$@", "$*", "${@}", "${*}", "${@:1}"):
            return []
        found = re.fullmatch(r"\$\{([A-Za-z_]\w*)\[[@*]\](?::?-)?\}", piece)
        if found is None:
            return None
        value = self.values.get(found[1])
        if value is None:
            return [self._unset(found[1], line)]
        return value if isinstance(value, list) else [value]

    def substitute(self, piece: str, line: int) -> Word:
        """The value of `$NAME`, `${...}`, `$((...))`, or, with a problem, of `$(...)` and backticks."""
        if piece.startswith("$((") and piece.endswith("))"):
            return self.arithmetic(piece[3:-2], line)
        if piece[0] == "`" or piece.startswith("$("):
            command = piece[1:-1] if piece[0] == "`" else piece[2:-1]
            return self._command(command.strip(), piece, line)
        if not piece.startswith("${"):
            return self._variable(piece[1:], line) if len(piece) > 1 else Word(piece)
        found = PARAMETER.fullmatch(piece[2:-1])
        if found is None or (found[1] and found[4]):
            return _unknown(piece, line)
        length, name, index, change = found.groups()
        if length or index in ("@", "*"):
            value = self.values.get(name)
            size = len(value) if isinstance(value, list) else len(value.text) if value else 0
            joined = " ".join(one.text for one in value) if isinstance(value, list) else value.text if value else ""
            return Word(str(size)) if length else Word(joined)
        plain = self._variable(name, line, index)
        return self._changed(plain, change, piece, line) if change else plain

    def _variable(self, name: str, line: int, index: str | None = None) -> Word:
        if name in ("@", "*"):
            return Word()
        value = self.values.get(name)
        if isinstance(value, list):
            number = int(index) if index and index.isdigit() else 0
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
        return Word(problem=Problem(f"line {line}: {' '.join(piece.split())} needs a shell, which is not run"))

    def _changed(self, plain: Word, change: str, piece: str, line: int) -> Word:
        """`${NAME...}` with what follows the name."""
        is_unset = plain.problem is not None and plain.problem.is_unset
        mark, argument = (change[:2], change[2:]) if change[:2] in (":-", ":=", ":+", ":?") else (change[0], change[1:])
        if mark in (":-", ":=", "-", "="):
            is_empty = is_unset or (mark[0] == ":" and not plain.text and plain.problem is None)
            found = self.text(argument, line) if is_empty else plain
            if is_empty and mark[-1] == "=" and (name := NAME.match(piece, 2)):
                self.values[name[0]] = found
            return found
        if mark in (":+", "+"):
            return Word() if is_unset or (mark == ":+" and not plain.text) else self.text(argument, line)
        if mark in (":?", "?") or plain.problem is not None:
            return plain
        if change in (",,", "^^", ",", "^"):
            return Word(_with_case(plain.text, change))
        if (sliced := re.fullmatch(r":\s*(\d+)(?::(\d+))?", change)) is not None:
            start = int(sliced[1])
            return Word(plain.text[start : start + int(sliced[2])] if sliced[2] else plain.text[start:])
        if mark in ("%", "#"):
            return Word(_stripped(plain.text, mark, self.text(argument.lstrip(mark), line).text, argument[:1] == mark))
        if mark == "/":
            old, _, new = argument.lstrip("/").partition("/")
            times = 0 if argument[:1] == "/" else 1
            replacement = self.text(new, line).text
            pattern = _pattern(self.text(old, line).text)
            return Word(re.sub(pattern, lambda _: replacement, plain.text, count=times))
        return _unknown(piece, line)

    def arithmetic(self, text: str, line: int) -> Word:
        """The value of `$((text))`, in integers."""
        word = self._in_double_quotes(text, line)
        if word.problem is not None:
            return word
        try:
            return Word(str(self._number(word.text, line, 0)))
        except (SyntaxError, KeyError, TypeError, ZeroDivisionError) as error:
            if isinstance(error, KeyError):
                return self._unset(str(error.args[0]), line)
            return _unknown(f"$(({text}))", line)

    def _number(self, text: str, line: int, depth: int) -> int:
        tree = ast.parse(text.replace("&&", " and ").replace("||", " or ").strip() or "0", mode="eval").body
        if depth > 20:
            raise ScriptError(f"line {line}: variables refer to each other in a circle in {text}; correct the script")

        def value(node: ast.expr) -> int:
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                return int(node.value)
            if isinstance(node, ast.Name):
                inner = self.values.get(node.id)
                if not isinstance(inner, Word) or inner.problem is not None:
                    raise KeyError(node.id)
                return self._number(inner.text, line, depth + 1)
            if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
                return _BINARY[type(node.op)](value(node.left), value(node.right))
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
                return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
            if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
                return int(_COMPARED[type(node.ops[0])](value(node.left), value(node.comparators[0])))
            raise TypeError(ast.dump(node))

        return value(tree)


def _divide(left: int, right: int) -> int:
    """As C divides: towards zero."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: lambda left, right: left - right * _divide(left, right),
    ast.Pow: operator.pow,
}
_COMPARED: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _unknown(piece: str, line: int) -> Word:
    return Word(problem=Problem(f"line {line}: {' '.join(piece.split())} is a form of bash that is not read here"))


def _with_case(text: str, change: str) -> str:
    changed = text.lower() if change[0] == "," else text.upper()
    return changed if len(change) == 2 else changed[:1] + text[1:]


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
