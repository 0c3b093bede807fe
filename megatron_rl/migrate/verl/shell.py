"""The call of verl in a run script, with the script's variables in place; no command of it is run.

Statements are followed from top to bottom, as bash does: assignments, `if`, `case`, `&&` and `||`, groups, and the
tests `[ ]`, `[[ ]]` and `(( ))`. verl's own scripts use nothing else; loops, functions and what else sets variables
are refused with their line. What a statement sets that only a shell could decide is not known, and a word of the call
that needs it is an error.

Invariants (tests/unit/migrate): a script has exactly one call that is reached; every word after it is returned; an
override is never lost, also not behind a comment that ends the command.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import reduce

from megatron_rl.migrate.verl.call import OVERRIDE, Override, UnsetVariables, VerlCall, take
from megatron_rl.migrate.verl.expansion import Problem, Variables, Word, decide
from megatron_rl.migrate.verl.lexer import ADVICE, ENDS, Cursor, Lexer, Operator, RawWord, ScriptError

MODULE = re.compile(r"[\w.]+\.main_(?:ppo|dapo)")
FILE = re.compile(r"[\w./-]*main_(?:ppo|dapo)\w*\.py")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
DECLARING = ("export", "declare", "typeset", "local", "readonly")
SHOWING = ("echo", "printf", "ls", "cat", "vi", "vim", "which")
INERT = (":", "true", "echo", "printf", "set", "trap", "ulimit", "cd")
NOT_READ = ("for", "while", "until", "select", "time", "coproc", "eval", "read", "mapfile", "readarray",
    "let", "getopts", "shift", "return", "break", "continue")  # fmt: skip
"""Commands that change what follows in a way that is not read here."""
LOOPS = ("for", "while", "until", "select")


class Left(Exception):  # noqa: N818 - it is no error
    """The script ends here."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


def read_script(text: str, given: Mapping[str, str]) -> VerlCall:
    """The one call of `main_ppo` or `main_dapo` in a script.

    Args:
        given: the variables from outside: of the environment, and the user's own, which the script cannot change.

    Raises:
        UnsetVariables: variables of the call are not set.
        ScriptError: there is no call or more than one, or the script has something that is not read.
    """
    reader, end = _Reader(variables=Variables.of(given)), None
    try:
        reader.read(text)
    except Left as left:
        end = left
    if len(reader.calls) == 1:
        return reader.calls[0]
    if reader.calls:
        lines = ", ".join(str(call.line) for call in reader.calls)
        why = f"the script calls verl {len(reader.calls)} times, in the lines {lines}; give one run a file"
        raise ScriptError(f"{why}\n{reader.unsure_call.text}" if reader.unsure_call else why)
    if reader.variables.required:
        raise UnsetVariables(reduce(Problem.and_also, reader.variables.required))
    if end is not None:
        raise ScriptError(f"line {end.line}: the script ends here, before it has called verl's trainer")
    what = "the script has no call such as `python3 -m verl.trainer.main_ppo key=value ...`"
    raise ScriptError(f"{what}; give the script that starts verl, or the overrides themselves")


@dataclass(slots=True)
class _State(Cursor):
    """What is known before a statement: the variables, and whether the statement runs."""

    variables: Variables = field(default_factory=Variables)
    runs: bool = True
    """Whether the present statement runs; another one is only stepped over."""
    unsure: Problem | None = None
    """Why the present statement may not run."""
    unknown: Problem = field(default_factory=lambda: Problem(""))
    """Why the last status is not known."""

    @contextmanager
    def _when(self, runs: bool, why: Problem | None = None) -> Iterator[None]:
        """Step over statements that do not run. With a reason for doubt they are followed, and may not run."""
        before = self.runs, self.unsure
        self.runs, self.unsure = self.runs and runs, self.unsure or why
        try:
            yield
        finally:
            self.runs, self.unsure = before

    def _decided(self, tokens: Sequence[RawWord | Operator | Word], line: int) -> bool | None:
        found = decide(tokens, self.variables)
        if isinstance(found, bool):
            return found
        self.unknown = Problem(f"line {line}, which needs a shell" if not found.text else f"line {line} ({found.text})")
        return None

    def _assign(self, word: RawWord) -> None:
        found = ASSIGNMENT.match(word.text)
        if found is None:
            if word.text.startswith("-A"):
                raise ScriptError(f"line {word.line}: an associative array is not read here; {ADVICE}")
            return
        name, old = found[1], self.variables.values.get(found[1])
        value: Word | list[Word]
        if found[2] is not None or (found[3] and word.array is None and isinstance(old, list)):
            raise ScriptError(f"line {word.line}: {word.text} is not read here; {ADVICE}")
        if word.array is not None:
            value = [element for one in word.array for element in self.variables.expand(one)]
            value = [*(old if isinstance(old, list) else [old] if old else []), *value] if found[3] else value
        else:
            written, home = word.text[found.end() :], self.variables.values.get("HOME")
            if re.match(r"~(/|$)", written) and isinstance(home, Word):
                written = home.text + written[1:]
            value = self.variables.text(written, word.line)
            if found[3] and isinstance(old, Word):
                value = Word(old.text + value.text, old.problem or value.problem)
        self._set(name, value, word.line)

    def _set(self, name: str, value: Word | list[Word] | None, line: int) -> None:
        """Set or unset a variable; its value is not known if it is not known whether the statement runs."""
        if name in self.variables.fixed:
            return
        if self.unsure is not None and value != self.variables.values.get(name):
            hint = "" if "--set" in self.unsure.text else f"; give it with --set {name}=VALUE"
            value = Word(problem=Problem(f"line {line}: {name} depends on {self.unsure.text}{hint}"))
        elif isinstance(value, Word) and (told := value.problem) and not told.unset and "--set" not in told.text:
            value = Word(problem=Problem(f"{told.text}; give {name} with --set {name}=VALUE"))
        if value is None:
            self.variables.values.pop(name, None)
        else:
            self.variables.values[name] = value


@dataclass(slots=True)
class _Reader(_State):
    """Reads statements and follows them at once. A status is True, False, or None where only a real shell knows it."""

    calls: list[VerlCall] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    unsure_call: Problem | None = None
    depth: int = 0
    """The number of subshells that the present statement is in."""
    comments: Sequence[int] = ()

    def read(self, text: str, line: int = 1) -> None:
        lexer = Lexer(text.replace("\r\n", "\n"), line)
        before = self.tokens, self.place, self.comments
        self.tokens, self.place, self.comments = lexer.tokens(), 0, lexer.comments
        self._list(())
        if self.place < len(self.tokens):
            self._fail()
        self.tokens, self.place, self.comments = before

    def _list(self, ends: Collection[str]) -> bool | None:
        """The statements up to one of the words or operators that end the list."""
        status: bool | None = True
        while True:
            while self._at(";", "\n", "&"):
                self.place += 1
            if self.place == len(self.tokens) or self._at(";;", ";&", ";;&", ")") or self._keyword() in ends:
                return status
            status = self._chain()

    def _chain(self) -> bool | None:
        status = self._pipe()
        while self._at("&&", "||"):
            operator = self._take().text
            runs = status is None or status == (operator == "&&")
            self._skip_lines()
            with self._when(runs, self.unknown if status is None else None):
                found = self._pipe()
            status = status if status is None or not runs else found
        return status

    def _pipe(self) -> bool | None:
        is_negated, before = False, dict(self.variables.values)
        while self._keyword() == "!":
            self.place, is_negated = self.place + 1, not is_negated
        status = self._command()
        while self._at("|", "|&"):
            self.place += 1
            self._skip_lines()
            status = self._command()
            self.variables.values = dict(before)  # the members of a pipe set nothing outside
        return status if status is None else status != is_negated

    def _command(self) -> bool | None:
        word = self._keyword()
        if word == "function" or (word and self._is(1, "(") and self._is(2, ")")):
            return self._function(word)
        if word in LOOPS and not self.runs:
            return self._loop()
        if word in NOT_READ:
            self._fail()
        if word == "if":
            return self._if()
        if word == "case":
            return self._case()
        if word == "{":
            return self._group("{")
        if self._at("("):
            before, self.depth = dict(self.variables.values), self.depth + 1
            self._group("(")
            self.variables.values, self.depth = before, self.depth - 1
            return None
        if word == "[[":
            return self._test()
        words: list[RawWord] = []
        while self.place < len(self.tokens) and isinstance(token := self.tokens[self.place], RawWord):
            words.append(token)
            self.place += 1
        if not words or self._at("("):
            self._fail()
        return self._simple(words) if self.runs else True

    def _function(self, word: str) -> bool:
        """Step over a function, which may not be called."""
        self.place += word == "function"
        self.functions.add(self._take().text)
        self.place += 2 * self._at("(")
        self._skip_lines()
        with self._when(False):
            self._command()
        return True

    def _loop(self) -> bool:
        """Step over a loop that does not run."""
        word = self._take()
        self._list(("do",))
        self._expect("do", "for", word.line)
        self._list(("done",))
        self._expect("done", "for", word.line)
        return True

    def _group(self, opening: str) -> bool | None:
        line = self._take().line
        status = self._list((ENDS[opening],))
        self._expect(ENDS[opening], opening, line)
        return status

    def _if(self) -> bool | None:
        line, done, why = self._take().line, False, None
        while True:
            with self._when(not done, why):
                status = self._list(("then",))
            self._expect("then", "if", line)
            if status is None and self.runs and not done:
                why = why or self.unknown
            with self._when(not done and status is not False, why):
                self._list(("elif", "else", "fi"))
            done = done or status is True
            if self._keyword() == "else":
                self.place += 1
                with self._when(not done, why):
                    self._list(("fi",))
            if self._keyword() != "elif":
                self._expect("fi", "if", line)
                return None if why else True
            self.place += 1

    def _case(self) -> bool | None:
        line, word = self._take().line, self._take()
        chosen, why, done = self.variables.text(word.text, word.line), None, False

        def note(told: Word) -> None:
            """Take note of a word that is not known; a variable that is not set is empty in bash."""
            nonlocal why
            if told.problem is not None and not told.problem.is_unset and self.runs:
                why = why or Problem(f"line {line} ({told.problem.text})")

        note(chosen)
        self._skip_lines()
        self._expect("in", "case", line)
        while True:
            self._skip_lines()
            if self._keyword() == "esac":
                self.place += 1
                return None if why else True
            self.place += self._at("(")
            found = False
            while not self._at(")"):
                pattern = self.variables.pattern(self._take().text, line)
                note(pattern)
                found = found or (pattern.text != "|" and fnmatchcase(chosen.text, pattern.text))
            self.place += 1
            with self._when(bool(why) or (found and not done), why):
                self._list(("esac",))
            done = done or found
            if self._at(";;"):
                self.place += 1
            elif self._keyword() != "esac":
                self._expect("esac", "case", line)

    def _test(self) -> bool | None:
        line, start = self._take().line, self.place
        while self._keyword() != "]]":
            if self._take().text == "\n":
                raise ScriptError(f"line {line}: [[ is not closed; complete the script, or {ADVICE}")
        self.place += 1
        return self._decided(self.tokens[start : self.place - 1], line) if self.runs else True

    def _simple(self, raw: Sequence[RawWord]) -> bool | None:
        number, line = 0, raw[0].line
        while number < len(raw) and (raw[number].array is not None or ASSIGNMENT.match(raw[number].text)):
            number += 1
        first = "" if number == len(raw) else raw[number].text
        if first in ("", *DECLARING):
            for one in raw if not first else raw[number + 1 :]:
                self._assign(one)
            return True
        if first.startswith("(("):
            word = self.variables.arithmetic(first[2:-2], line)
            self.unknown = Problem(f"line {line} ({word.problem.text})") if word.problem else self.unknown
            return None if word.problem else word.text != "0"
        words = [(word, one.line) for one in raw[number:] if one.array is None for word in self.variables.expand(one)]
        texts = [word.text for word, _ in words]
        if not texts:
            return True
        if (start := _start(texts)) is not None:
            self._call(words, start, raw[-1].line)
        elif texts[0] in ("[", "test"):
            return self._decided([word for word, _ in words[1 : -1 if texts[0] == "[" else None]], line)
        elif texts[0] in INERT and texts[1:2] not in (["--"], ["-v"]):
            if self.unsure is None and self.variables.required:
                raise Left(line)
            return True
        elif texts[0] in ("exit", "false"):
            if texts[0] == "exit" and self.unsure is None:
                if self.depth:
                    raise ScriptError(f"line {line}: `exit` of a subshell is not read here; {ADVICE}")
                raise Left(line)
            return texts[0] == "exit"
        elif texts[0] == "unset":
            for name in texts[1:]:
                self._set(name, None, line)
            return True
        elif texts[0] in (*NOT_READ, *INERT, *self.functions):
            raise ScriptError(f"line {line}: `{' '.join(texts[:2])}` is not read here; {ADVICE}")
        elif texts[0] in ("source", "."):
            file = " ".join(texts[1:])
            self.notes.append(f"line {line}: the file of `source {file}` is not read; give what it sets with --set")
        elif texts[0] not in SHOWING:
            self._nested(words)
            self._lost(raw)
        self.unknown = Problem(f"line {line}, which needs a shell")
        return None

    def _call(self, words: Sequence[tuple[Word, int]], start: int, last_line: int) -> None:
        call = VerlCall(words[start][0].text, words[start][1], last_line=last_line, notes=list(self.notes))
        take(call, words[start + 1 :], self.variables.required)
        self.calls.append(call)
        if self.unsure is not None:
            self.unsure_call = Problem(f"which of them runs depends on {self.unsure.text}")

    def _nested(self, words: Sequence[tuple[Word, int]]) -> None:
        """A call inside of a quoted word, such as `bash -c "python3 -m verl.trainer.main_ppo ..."`."""
        for word, line in words:
            if re.search(r"\bmain_(ppo|dapo)\b.*\s", word.text, re.DOTALL):
                self.read(word.text, line)

    def _lost(self, raw: Sequence[RawWord]) -> None:
        """Overrides after a comment, or after a backslash that does not end its line, which has ended the call."""
        found = OVERRIDE.fullmatch(raw[0].text)
        if not self.calls or found is None or "." not in found[2] or found[3] is None:
            return
        ends = [line for line in self.comments if self.calls[-1].line < line <= raw[0].line]
        end = f"the comment in line {ends[-1]}" if ends else f"line {self.calls[-1].last_line}"
        why = f"{end} ends the command, so the shell does not pass this word to verl; correct the script"
        for one in raw:
            for word in self.variables.expand(one):
                if (lost := OVERRIDE.fullmatch(word.text)) is not None:
                    self.calls[-1].overrides.append(Override(lost[2], lost[3] or "", one.line, lost[1], why))


def _start(words: Sequence[str]) -> int | None:
    """The place of the trainer's module or file among the words of a command; None if there is none."""
    if words[0] in SHOWING:
        return None
    for place in range(1, len(words)):
        is_module = words[place - 1] == "-m" and MODULE.fullmatch(words[place])
        if is_module or FILE.fullmatch(words[place]):
            return place
    return None
