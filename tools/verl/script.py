"""The call of verl in a run script, with the script's variables in place; no command of it is run.

Statements are followed from top to bottom. An `if` whose condition compares texts, numbers or emptiness is decided;
what another condition or a loop sets is not known, and a word that needs it says so.

Invariants (tests/unit/tools): a script has exactly one call that is reached; every word after it is returned; an
override is never lost, also not behind a comment that ends the command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import PurePosixPath

from megatron_rl.tools.verl.expansion import Problem, Variables, Word
from megatron_rl.tools.verl.lexer import Lexer, Operator, RawWord, ScriptError

MODULE = re.compile(r"[\w.]+\.main_(?:ppo|dapo)")
FILE = re.compile(r"[\w./-]*main_(?:ppo|dapo)\w*\.py")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[\d+\])?(\+?)=")
OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w./@-]*)(?:=(.*))?", re.DOTALL)
DECLARING = ("export", "declare", "typeset", "local", "readonly")
HYDRA = {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}


@dataclass(frozen=True, slots=True)
class Override:
    """One `key=value` of the command, with Hydra's prefix (`+`, `++` or `~`) and the line of the script."""

    key: str
    text: str
    line: int
    prefix: str = ""
    problem: str | None = None
    """Why the value is not known, or why verl never gets it."""


class UnsetVariables(ScriptError):
    """Variables of the call are not set.

    Args:
        problem: all of them.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.names = problem.unset


@dataclass(slots=True)
class VerlCall:
    """A call of verl's trainer: the module, the line, Hydra's own options, and the overrides."""

    module: str
    line: int
    options: dict[str, Word] = field(default_factory=dict)
    overrides: list[Override] = field(default_factory=list)
    last_line: int = 0


def read_script(text: str, given: Mapping[str, str]) -> VerlCall:
    """The one call of `main_ppo` or `main_dapo` in a script.

    Args:
        given: the variables from outside: of the environment, and the user's own, which the script cannot change.

    Raises:
        UnsetVariables: variables of the call are not set.
        ScriptError: there is no call or more than one, or the script is incomplete.
    """
    reader = _Reader(Variables.of(given), frozenset(given))
    reader.read(text)
    if not reader.calls:
        raise ScriptError(
            "the script has no call such as `python3 -m verl.trainer.main_ppo key=value ...`; give the script that "
            "starts verl, or the overrides themselves"
        )
    if len(reader.calls) > 1:
        lines = ", ".join(str(call.line) for call in reader.calls)
        raise ScriptError(f"the script calls verl {len(reader.calls)} times, in the lines {lines}; give one run a file")
    return reader.calls[0]


def read_overrides(words: Sequence[str]) -> VerlCall:
    """The overrides that are given without a script; their line is 0.

    Raises:
        ScriptError: a word is no override.
    """
    call = VerlCall("verl.trainer.main_ppo", 0)
    _take(call, [(Word(word), 0) for word in words])
    return call


@dataclass(slots=True)
class _Branch:
    """An open `if`, loop or `case`."""

    kind: str
    line: int
    active: bool | None
    """Whether its statements run now; None if only a shell knows."""
    taken: bool | None = False
    """Whether one of its branches has run."""


@dataclass(slots=True)
class _Reader:
    variables: Variables
    fixed: frozenset[str]
    calls: list[VerlCall] = field(default_factory=list)
    branches: list[_Branch] = field(default_factory=list)

    def read(self, text: str, line: int = 1) -> None:
        lexer = Lexer(text.replace("\r\n", "\n"), line)
        words: list[RawWord] = []
        tokens = lexer.tokens()
        for token in [*tokens, Operator("\n", lexer.line)]:
            if isinstance(token, RawWord):
                words.append(token)
                continue
            if words and not (token.text == ")" and self._in_case()):
                self._statement(words, lexer.comments)
            words = []
        if self.branches and self.branches[-1].kind == "if" and line == 1:
            raise ScriptError(f"line {self.branches[-1].line}: the `if` has no `fi`; complete the script")

    def _in_case(self) -> bool:
        return bool(self.branches) and self.branches[-1].kind == "case"

    def _statement(self, words: list[RawWord], comments: Sequence[int]) -> None:
        """Follow one command with the keywords in front of it."""
        while words and words[0].array is None:
            first, line = words[0].text, words[0].line
            if first in ("if", "elif"):
                self._condition(first, words[1:], line)
                return
            if first in ("for", "while", "until", "select", "case"):
                self.branches.append(_Branch("case" if first == "case" else "loop", line, None))
                return
            if first in ("then", "do", "{", "}", "!", "time"):
                words = words[1:]
            elif first == "else":
                self._else()
                words = words[1:]
            elif first in ("fi", "done", "esac"):
                if self.branches:
                    self.branches.pop()
                words = words[1:]
            else:
                break
        if words and self._active is not False:
            self._command(words, comments)

    @property
    def _active(self) -> bool | None:
        states = [branch.active for branch in self.branches]
        return False if False in states else None if None in states else True

    def _condition(self, keyword: str, words: list[RawWord], line: int) -> None:
        if keyword == "if":
            self.branches.append(_Branch("if", line, True, False))
        elif not self.branches:
            raise ScriptError(f"line {line}: `elif` without `if`; correct the script")
        branch = self.branches[-1]
        if branch.taken:
            branch.active = False
            return
        found = self._decide(words)
        maybe = None if branch.taken is None and found is not False else found
        branch.active = maybe
        branch.taken = True if found and branch.taken is False else None if found is None else branch.taken

    def _else(self) -> None:
        if self.branches:
            branch = self.branches[-1]
            branch.active = None if branch.taken is None else not branch.taken

    def _decide(self, raw: list[RawWord]) -> bool | None:
        """The value of `[ ... ]`, `[[ ... ]]` or `test ...`; None if only a shell knows it."""
        words = [word for one in raw for word in (self.variables.expand(one) or [Word()])]
        if any(word.problem and not word.problem.is_unset for word in words):
            return None
        texts = [word.text for word in words]
        if not texts or texts[0] not in ("[", "[[", "test"):
            return {"true": True, "false": False}.get(texts[0]) if texts else None
        inside = texts[1:-1] if texts[0] != "test" else texts[1:]
        negated = inside[:1] == ["!"]
        found = _compare(inside[1:] if negated else inside)
        return found if found is None else found != negated

    def _command(self, words: list[RawWord], comments: Sequence[int]) -> None:
        number = 0
        while number < len(words) and (words[number].array is not None or ASSIGNMENT.match(words[number].text)):
            number += 1
        if number == len(words):
            for word in words:
                self._assign(word)
        elif words[number].text in DECLARING:
            for word in words[number + 1 :]:
                if word.array is not None or ASSIGNMENT.match(word.text):
                    self._assign(word)
        elif (start := self._start(words)) is not None:
            self._call(words, start)
        else:
            self._nested(words)
            self._lost(words, comments)

    def _assign(self, word: RawWord) -> None:
        found = ASSIGNMENT.match(word.text)
        assert found is not None, "the word is an assignment"
        name, appends = found[1], bool(found[3])
        if name in self.fixed or found[2]:
            return
        if self._active is None:
            line = next(branch.line for branch in self.branches if branch.active is None)
            reason = f"line {word.line}: {name} depends on line {line}, which needs a shell"
            self.variables.values[name] = Word(problem=Problem(f"{reason}; give it with --set {name}=VALUE"))
            return
        old = self.variables.values.get(name)
        if word.array is not None:
            elements = [element for one in word.array for element in self.variables.expand(one)]
            before = old if isinstance(old, list) else [old] if old else []
            self.variables.values[name] = [*before, *elements] if appends else elements
            return
        value = self.variables.text(word.text[found.end() :], word.line)
        if appends and isinstance(old, Word):
            value = Word(old.text + value.text, old.problem or value.problem)
        self.variables.values[name] = value

    def _start(self, words: Sequence[RawWord]) -> int | None:
        """The place of the trainer's module or file among the words of a command; None if there is none."""
        for place, word in enumerate(words):
            name = word.text.strip("'\"")
            is_module = place > 0 and words[place - 1].text == "-m" and MODULE.fullmatch(name)
            is_file = place > 0 and FILE.fullmatch(name) and not words[0].text.startswith(("echo", "ls", "cat", "vi"))
            if is_module or is_file:
                return place
        return None

    def _call(self, words: Sequence[RawWord], start: int) -> None:
        call = VerlCall(words[start].text.strip("'\""), words[start].line)
        expanded = [(word, raw.line) for raw in words[start + 1 :] for word in self.variables.expand(raw)]
        _take(call, expanded)
        call.last_line = words[-1].line
        self.calls.append(call)

    def _nested(self, words: Sequence[RawWord]) -> None:
        """A call inside of a quoted word, such as `bash -c "python3 -m verl.trainer.main_ppo ..."`."""
        if words[0].text in ("echo", "printf"):
            return
        for raw in words:
            if re.search(r"\bmain_(ppo|dapo)\b", raw.text) and re.search(r"\s", raw.text):
                for word in self.variables.expand(raw):
                    self.read(word.text, raw.line)

    def _lost(self, words: Sequence[RawWord], comments: Sequence[int]) -> None:
        """Overrides after a comment, or after a backslash that does not end its line, which has ended the call."""
        found = OVERRIDE.fullmatch(words[0].text)
        if not self.calls or found is None or "." not in found[2] or found[3] is None:
            return
        ends = [line for line in comments if self.calls[-1].line < line <= words[0].line]
        end = f"the comment in line {ends[-1]}" if ends else f"line {self.calls[-1].last_line}"
        why = f"{end} ends the command, so the shell does not pass this word to verl; correct the script"
        for raw in words:
            for word in self.variables.expand(raw):
                if (one := OVERRIDE.fullmatch(word.text)) is not None:
                    self.calls[-1].overrides.append(Override(one[2], one[3] or "", raw.line, one[1], why))


def _take(call: VerlCall, words: Sequence[tuple[Word, int]]) -> None:
    """Add the words after the module to a call: Hydra's options and overrides."""
    unset = [word.problem for word, _ in words if word.problem is not None and word.problem.is_unset]
    if unset:
        raise UnsetVariables(reduce(Problem.and_also, unset))
    place = 0
    while place < len(words):
        word, line = words[place]
        place += 1
        if word.text.startswith("-") and not word.text.startswith("-="):
            name, equals, value = word.text.partition("=")
            name = HYDRA.get(name, name)
            option = Word(value, word.problem)
            takes_value = name in ("--config-path", "--config-name", "--config-dir", "--package")
            if not equals and takes_value and place < len(words):
                option, place = words[place][0], place + 1
            call.options[name] = option
            continue
        found = OVERRIDE.fullmatch(word.text)
        if found is None or (found[3] is None and found[1] != "~"):
            if word.problem is None and not word.text.strip():
                continue
            where = f"line {line}: " if line else ""
            raise ScriptError(f"{where}{word.text!r} is no override of the form key=value; correct or remove it")
        problem = word.problem.text if word.problem else None
        call.overrides.append(Override(found[2], found[3] or "", line, found[1], problem))


def _compare(words: Sequence[str]) -> bool | None:
    """The value of a test without its brackets; None for files and other tests that need the machine."""
    if "&&" in words or "||" in words or "-a" in words or "-o" in words:
        return None
    match list(words):
        case ["-z", text]:
            return not text
        case ["-n", text] | [text]:
            return bool(text)
        case [left, "=" | "==", right]:
            glob = right if "*" in right else None
            return PurePosixPath(left).match(glob) if glob and "/" not in left + right else left == right
        case [left, "!=", right]:
            return left != right
        case [left, ("-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge") as sign, right]:
            if not re.fullmatch(r"-?\d+", left) or not re.fullmatch(r"-?\d+", right):
                return None
            difference = int(left) - int(right)
            return {
                "-eq": difference == 0,
                "-ne": difference != 0,
                "-lt": difference < 0,
                "-le": difference <= 0,
                "-gt": difference > 0,
                "-ge": difference >= 0,
            }[sign]
        case _:
            return None
