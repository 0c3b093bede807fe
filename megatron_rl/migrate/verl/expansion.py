"""What bash makes of a word: quotes are removed, and variables and arithmetic are replaced by their values. The tests
`[ ]` and `[[ ]]` are decided here, too.

No command is run. A part that only a command could give, a form that is not read here, and a variable that is not set
leave a `Problem` in the word, which the reader of the word reports if the word matters.

Invariant (tests/unit/migrate): a word whose text is not known has a problem, and so has all that is made of it.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from pathlib import PurePosixPath

from megatron_rl.migrate.verl.lexer import ADVICE, Lexer, Operator, RawWord, piece_size

ALL_ELEMENTS = re.compile(r"\$(?:\{([A-Za-z_]\w*)\[([@*])\](?:(:?[-+])(.*))?\}|[@*]|\{[@*]\}|\{@:1\})", re.DOTALL)
SHORT = re.compile(r"[A-Za-z_]\w*|[@*#?$!0-9-]")
PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9#])(?:\[(@|\*|\d+)\])?(.*)", re.DOTALL)
CHANGED_IN_PLACE = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))")


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
            is_quoted = piece[0] == '"'
            array = self._array(piece[1:-1] if is_quoted else piece, raw.line, is_quoted)
            if array is None and (is_quoted or piece[0] != "$" or len(piece) == 1):
                current = current or Word()
                current.add(self._quoted(piece, raw.line))
                continue
            found = self.substitute(piece, raw.line) if array is None else Word()
            is_split = array is None and found.problem is None
            parts = [Word(one) for one in found.text.split()] if is_split else array or [found][: array is None]
            if is_split and found.text[:1].isspace() and current is not None:
                fields.append(current)
                current = None
            for number, part in enumerate(parts):
                if number and current is not None:
                    fields.append(current)
                    current = None
                current = current or Word()
                current.add(part)
            if is_split and found.text[-1:].isspace() and current is not None:
                fields.append(current)
                current = None
        return [*fields, *([current] if current is not None else [])]

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
            piece = text[place : place + (piece_size(text, place, line) if is_whole else 1)]
            place += len(piece)
            if piece == "$" and (found := SHORT.match(text, place)):
                piece, place = piece + found[0], found.end()
            whole.add(self.substitute(piece, line) if len(piece) > 1 and char in "$`" else Word(piece))
        return whole

    def _array(self, piece: str, line: int, is_quoted: bool) -> list[Word] | None:
        """The elements of `${NAME[@]}`, or of `$@`, which is empty because nobody has started the script."""
        found = ALL_ELEMENTS.fullmatch(piece)
        if found is None or (not is_quoted and found[1] and not found[3]):
            return None if found is None else self._array(piece, line, True)
        name, mark, change, argument = found.groups()
        value = self.values.get(name, []) if name else []
        elements = value if isinstance(value, list) else [value]
        if name in self.fixed:
            elements = [Word(one) for word in elements for one in shlex.split(word.text)]
        if change is not None and (change[-1] == "+") == bool(elements):
            return [word for one in _words(argument, line) for word in self.expand(one)]
        if mark == "*" and change is None and is_quoted:
            return [self.substitute(piece, line)] if elements else []
        return [] if change is not None and change[-1] == "+" else elements

    def substitute(self, piece: str, line: int) -> Word:
        """The value of `$NAME`, `${...}`, `$((...))`, or, with a problem, of `$(...)` and backticks."""
        if piece.startswith("$((") and piece.endswith("))"):
            return self.arithmetic(piece[3:-2], line)
        if piece[0] == "`" or piece.startswith("$("):
            return self._command((piece[1:-1] if piece[0] == "`" else piece[2:-1]).strip(), piece, line)
        found = PARAMETER.fullmatch(piece[2:-1] if piece.startswith("${") else piece[1:])
        if piece in ("$@", "$*", "$"):
            return Word("" if len(piece) > 1 else piece)
        if found is None or piece.startswith("$'") or (found[1] and found[4]):
            return _unknown(piece, line)
        length, name, index, change = found.groups()
        if name == "#":
            return Word("0")
        if length and index is None:
            return _unknown(piece, line)
        value = self.values.get(name)
        if length:
            return Word(str(len(value) if isinstance(value, list) else value is not None))
        if isinstance(value, list):
            if index in ("@", "*"):
                if change:
                    return _unknown(piece, line)
                whole = Word()
                for number, one in enumerate(value):
                    whole.add(Word(" " * bool(number) + one.text, one.problem))
                return whole
            number = int(index or 0)
            value = value[number] if number < len(value) else None
        plain = self._unset(name, line) if value is None else value
        return self._changed(plain, name, change, piece, line) if change else plain

    def _unset(self, name: str, line: int) -> Word:
        what = f"the argument ${name} of the script" if name.isdigit() else f"the variable {name}"
        return Word(problem=Problem(f"line {line}: {what} is not set; give it with --set {name}=VALUE", (name,)))

    def _command(self, command: str, piece: str, line: int) -> Word:
        if command == "pwd" and "PWD" in self.values:
            return self.substitute("$PWD", line)
        if (found := re.fullmatch(r"basename\s+(\S+)", command)) and not set(command) & set("|;&`("):
            word = Word()
            for one in self.expand(RawWord(found[1], line)):
                word.add(one)
            return Word(PurePosixPath(word.text).name, word.problem)
        if (found := re.fullmatch(r"date\s+['\"]?\+([%\w.:-]+)['\"]?", command)) is not None:
            return Word(time.strftime(found[1]))
        return Word(problem=Problem(f"line {line}: {' '.join(piece.split())} needs a shell, which is not run"))

    def _changed(self, plain: Word, name: str, change: str, piece: str, line: int) -> Word:
        """`${NAME...}` with what follows the name: a default, another value, an error, or another case."""
        is_unset = plain.problem is not None and plain.problem.is_unset
        mark, argument = (change[:2], change[2:]) if change[:1] == ":" else (change[0], change[1:])
        is_empty = is_unset or (mark[0] == ":" and not plain.text and plain.problem is None)
        if mark in (":-", "-", ":=", "="):
            found = self.text(argument, line) if is_empty else plain
            if is_empty and mark[-1] == "=":
                self.values[name] = found
            return found
        if mark in (":+", "+") and (is_empty or plain.problem is None):
            return Word() if is_empty else self.text(argument, line)
        if mark in (":?", "?") and is_empty:
            missing = self._unset(name, line)
            self.required += [missing.problem] if missing.problem else []
            return missing
        if plain.problem is not None or mark in (":?", "?"):
            return plain
        return Word(plain.text.lower()) if change == ",," else _unknown(piece, line)

    def arithmetic(self, text: str, line: int) -> Word:
        """The value of `$((text))`, in integers."""
        word = self._in_double_quotes(text, line)
        if word.problem is not None:
            return word
        try:
            return Word(str(self._number(word.text)))
        except KeyError as error:
            inner = self.values.get(str(error.args[0]))
            return inner if isinstance(inner, Word) else self._unset(str(error.args[0]), line)
        except (SyntaxError, TypeError, ZeroDivisionError, RecursionError):
            unknown = _unknown(f"(({text}))", line)
            self.values |= {found[1]: unknown for found in CHANGED_IN_PLACE.finditer(text)}
            return unknown

    def _number(self, text: str) -> int:
        """The value of an expression whose signs Python reads as the shell does.

        Raises:
            SyntaxError, TypeError: another form.
            KeyError: a variable has no value.
        """
        signs = set(re.findall(r"#|\?|\*\*|!(?!=)|[<>=]=?|-", text))
        if signs & {"#", "?", "!"} or {"**", "-"} <= signs:
            raise SyntaxError(text)
        return self._of(ast.parse(text.replace("&&", " and ").replace("||", " or ").strip() or "0", mode="eval").body)

    def _of(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(int(number)):
                return number
            case ast.Name(name):
                value = self.values.get(name)
                if not isinstance(value, Word) or value.problem is not None:
                    raise KeyError(name)
                return self._number(value.text)
            case ast.BoolOp(sign, values):
                parts = [bool(self._of(one)) for one in values]
                return int(all(parts) if isinstance(sign, ast.And) else any(parts))
            case ast.UnaryOp(ast.USub(), operand):
                return -self._of(operand)
            case ast.BinOp(left, sign, right) if type(sign) in BINARY:
                return BINARY[type(sign)](self._of(left), self._of(right))
            case ast.Compare(left, [sign], [right]) if type(sign) in COMPARED:
                return int(COMPARED[type(sign)](self._of(left), self._of(right)))
        raise TypeError(ast.dump(node))


def _divide(left: int, right: int) -> int:
    """Integer division as in C, which truncates towards zero."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: lambda left, right: left - right * _divide(left, right),
    ast.Pow: operator.pow,
}
COMPARED: dict[type, Callable[[int, int], bool]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt},
    **{ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
}
SIGNS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
NOT_KNOWN = Problem("")


def decide(tokens: Sequence[RawWord | Operator | Word], variables: Variables) -> bool | Problem:
    """Whether a test holds, or why only a shell knows it.

    Args:
        tokens: of `[[ ... ]]` the tokens as they are written; of `[ ... ]` its words, which are expanded already.
    """
    texts = [one.text for one in tokens]
    for sign, decisive in (("||", True), ("&&", False)):
        if sign in texts:
            place = texts.index(sign)
            parts = [decide(tokens[:place], variables), decide(tokens[place + 1 :], variables)]
            if decisive in parts:
                return decisive
            return next((one for one in parts if isinstance(one, Problem)), not decisive)
    if texts[:1] == ["!"]:
        found = decide(tokens[1:], variables)
        return found if isinstance(found, Problem) else not found
    is_equality = len(texts) == 3 and texts[1] in ("=", "==", "!=")
    words = [_compared(one, variables, is_equality and number == 2) for number, one in enumerate(tokens)]
    for word in words:
        if word.problem is not None and not word.problem.is_unset:
            return word.problem
    match [word.text for word in words]:
        case []:
            return False
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [left, ("=" | "==" | "!=") as sign, right]:
            is_equal = fnmatchcase(left, right) if isinstance(tokens[-1], RawWord) else left == right
            return is_equal == (sign != "!=")
        case [left, sign, right] if sign in SIGNS and re.fullmatch(r"-?\d+ -?\d+", f"{left} {right}"):
            return bool(SIGNS[sign](int(left), int(right)))
    return NOT_KNOWN


def _compared(token: RawWord | Operator | Word, variables: Variables, is_pattern: bool) -> Word:
    if not isinstance(token, RawWord):
        return token if isinstance(token, Word) else Word(token.text)
    return (variables.pattern if is_pattern else variables.text)(token.text, token.line)


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
    shown = " ".join(piece.split())
    return Word(problem=Problem(f"line {line}: {shown} is a form of bash that is not read here; {ADVICE}"))
