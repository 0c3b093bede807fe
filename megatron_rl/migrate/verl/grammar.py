"""The statements of a shell script as a tree, by bash's grammar. Nothing is expanded or run here.

A form that bash has and this grammar has not is an error with its line, and never left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from megatron_rl.migrate.verl.lexer import Operator, RawWord, ScriptError

ADVICE = "give the words that `bash -x` prints for the command in place of the script"


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its words, among them assignments, `[ ... ]` and `((...))`."""

    words: Sequence[RawWord]


@dataclass(frozen=True, slots=True)
class Test:
    """`[[ ... ]]`, without the brackets."""

    tokens: Sequence[RawWord | Operator]
    line: int


@dataclass(frozen=True, slots=True)
class Chain:
    """`first && second || third`: a command, and the operators with the commands behind them."""

    first: Node
    rest: Sequence[tuple[str, Node]]


@dataclass(frozen=True, slots=True)
class Pipe:
    members: Sequence[Node]
    is_negated: bool = False


@dataclass(frozen=True, slots=True)
class If:
    clauses: Sequence[tuple[Sequence[Node], Sequence[Node]]]
    otherwise: Sequence[Node]
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """`for` and `select`; the words are None for `select` and for an arithmetic loop."""

    name: str
    words: Sequence[RawWord] | None
    body: Sequence[Node]
    line: int


@dataclass(frozen=True, slots=True)
class While:
    condition: Sequence[Node]
    body: Sequence[Node]
    is_until: bool
    line: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The word, and for each clause its patterns, its commands and the operator that ends it."""

    word: RawWord
    clauses: Sequence[tuple[Sequence[RawWord], Sequence[Node], str]]
    line: int


@dataclass(frozen=True, slots=True)
class Compound:
    body: Sequence[Node]
    is_subshell: bool


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    body: Node


Node = Simple | Test | Chain | Pipe | If | For | While | Selection | Compound | Function
ENDS = {"if": "fi", "then": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}", "(": ")"}
CLAUSE_ENDS = (";;&", ";&", ";;")


@dataclass(slots=True)
class Parser:
    tokens: Sequence[RawWord | Operator]
    place: int = 0
    opened: list[tuple[str, int]] = field(default_factory=list)

    def script(self) -> list[Node]:
        """The statements of the whole script.

        Raises:
            ScriptError: it is incomplete, or has a form that is not read here.
        """
        found = self._list(())
        if self.place < len(self.tokens):
            self._fail()
        return found

    def _list(self, ends: Collection[str]) -> list[Node]:
        """The statements up to one of the words or operators that end the list."""
        found: list[Node] = []
        while True:
            while self._at(";", "\n"):
                self.place += 1
            if self.place == len(self.tokens):
                if ends:
                    word, line = self.opened[-1]
                    raise ScriptError(f"line {line}: the `{word}` has no `{ENDS[word]}`; complete the script")
                return found
            if self._at(*CLAUSE_ENDS, ")") or (ends and self._keyword() in ends):
                return found
            node = self._chain()
            if self._at("&"):
                self.place += 1
                node = Compound([node], is_subshell=True)
            found.append(node)

    def _chain(self) -> Node:
        first, rest = self._pipe(), []
        while self._at("&&", "||"):
            operator = self._take().text
            self._skip_lines()
            rest.append((operator, self._pipe()))
        return Chain(first, rest) if rest else first

    def _pipe(self) -> Node:
        is_negated = False
        while self._keyword() in ("!", "time"):
            is_negated ^= self._take().text == "!"
        members = [self._command()]
        while self._at("|", "|&"):
            self.place += 1
            self._skip_lines()
            members.append(self._command())
        return Pipe(members, is_negated) if len(members) > 1 or is_negated else members[0]

    def _command(self) -> Node:
        if self._at("("):
            return self._group(")", is_subshell=True)
        word = self._keyword()
        if word == "if":
            return self._if()
        if word in ("for", "select"):
            return self._for()
        if word in ("while", "until"):
            line = self._open(word)
            condition = self._list(("do",))
            return While(condition, self._body(), word == "until", line)
        if word == "case":
            return self._case()
        if word == "{":
            return self._group("}", is_subshell=False)
        if word == "[[":
            return self._test()
        if word == "function" or (word and self._is_operator(1, "(") and self._is_operator(2, ")")):
            return self._function(word)
        words: list[RawWord] = []
        while self.place < len(self.tokens) and isinstance(token := self.tokens[self.place], RawWord):
            words.append(token)
            self.place += 1
        if not words or self._at("("):
            self._fail()
        return Simple(words)

    def _group(self, end: str, *, is_subshell: bool) -> Compound:
        self._open("(" if is_subshell else "{")
        body = self._list((end,))
        self._expect(end)
        self.opened.pop()
        return Compound(body, is_subshell)

    def _if(self) -> If:
        line, clauses, otherwise = self._open("if"), [], []
        while True:
            condition = self._list(("then",))
            self._expect("then")
            clauses.append((condition, self._list(("elif", "else", "fi"))))
            word = self._take().text
            if word == "else":
                otherwise = self._list(("fi",))
                self._expect("fi")
            if word != "elif":
                self.opened.pop()
                return If(clauses, otherwise, line)

    def _for(self) -> For:
        is_select, line = self._keyword() == "select", self._open("for")
        name = self._word().text
        words: list[RawWord] | None = None if name.startswith("((") else [RawWord('"$@"', line)]
        self._skip_lines()
        if self._keyword() == "in":
            self.place += 1
            words = []
            while self.place < len(self.tokens) and isinstance(token := self.tokens[self.place], RawWord):
                words.append(token)
                self.place += 1
        while self._at(";", "\n"):
            self.place += 1
        return For(name, None if is_select else words, self._body(), line)

    def _body(self) -> list[Node]:
        self._expect("do")
        body = self._list(("done",))
        self._expect("done")
        self.opened.pop()
        return body

    def _case(self) -> Selection:
        line = self._open("case")
        word = self._word()
        clauses: list[tuple[Sequence[RawWord], Sequence[Node], str]] = []
        self._skip_lines()
        self._expect("in")
        while True:
            self._skip_lines()
            if self._keyword() == "esac":
                self.place += 1
                self.opened.pop()
                return Selection(word, clauses, line)
            if self._at("("):
                self.place += 1
            patterns = [self._word()]
            while self._at("|"):
                self.place += 1
                patterns.append(self._word())
            self._expect(")")
            body = self._list(("esac",))
            clauses.append((patterns, body, self._take().text if self._at(*CLAUSE_ENDS) else ";;"))

    def _test(self) -> Test:
        line, start = self._take().line, self.place
        while self.place < len(self.tokens):
            if self._keyword() == "]]":
                self.place += 1
                return Test(self.tokens[start : self.place - 1], line)
            self.place += 1
        raise ScriptError(f"line {line}: [[ is not closed; complete the script")

    def _function(self, word: str) -> Function:
        if word == "function":
            self.place += 1
        name = self._word().text
        if self._at("("):
            self.place += 1
            self._expect(")")
        self._skip_lines()
        return Function(name, self._command())

    def _open(self, word: str) -> int:
        line = self._take().line
        self.opened.append((word, line))
        return line

    def _keyword(self) -> str:
        """The text of the word at this place; empty if there is an operator or an array."""
        token = self.tokens[self.place] if self.place < len(self.tokens) else None
        return token.text if isinstance(token, RawWord) and token.array is None else ""

    def _is_operator(self, ahead: int, *texts: str) -> bool:
        place = self.place + ahead
        token = self.tokens[place] if place < len(self.tokens) else None
        return isinstance(token, Operator) and token.text in texts

    def _at(self, *texts: str) -> bool:
        return self._is_operator(0, *texts)

    def _take(self) -> RawWord | Operator:
        if self.place == len(self.tokens):
            self._fail()
        self.place += 1
        return self.tokens[self.place - 1]

    def _word(self) -> RawWord:
        token = self._take()
        if not isinstance(token, RawWord):
            self.place -= 1
            self._fail()
        return token

    def _expect(self, text: str) -> None:
        if not self._at(text) and self._keyword() != text:
            self._fail()
        self.place += 1

    def _skip_lines(self) -> None:
        while self._at("\n"):
            self.place += 1

    def _fail(self) -> NoReturn:
        last = self.tokens[min(self.place, len(self.tokens) - 1)]
        if self.place >= len(self.tokens):
            raise ScriptError(f"line {last.line}: the script ends in the middle of a command; complete it, or {ADVICE}")
        shown = "the end of the line" if last.text == "\n" else f"`{last.text}`"
        raise ScriptError(f"line {last.line}: {shown} is not read at this place; {ADVICE}")
