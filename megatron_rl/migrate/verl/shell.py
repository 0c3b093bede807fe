"""The state of a shell that is followed: its variables, and whether it is known that the present statement runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_rl.migrate.verl.expansion import Problem, Variables, Word
from megatron_rl.migrate.verl.grammar import ADVICE
from megatron_rl.migrate.verl.lexer import RawWord

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")


class Left(Exception):  # noqa: N818 - it is no error
    """The script, a function or a loop ends here, by the command of this name."""

    def __init__(self, command: str, line: int, loops: int = 1) -> None:
        super().__init__(command)
        self.command, self.line, self.loops = command, line, loops


@dataclass(slots=True)
class Shell:
    """A status is True, False, or None where only a real shell knows it; `unknown` then says why."""

    variables: Variables
    unsure: Problem | None = None
    """Why the present statement may not run."""
    unknown: Problem = field(default_factory=lambda: Problem(""))

    @contextmanager
    def perhaps(self, why: Problem | None) -> Iterator[None]:
        """Follow statements that may not run, if there is a reason for it."""
        before = self.unsure
        self.unsure = before or why
        try:
            yield
        finally:
            self.unsure = before

    @contextmanager
    def subshell(self, is_subshell: bool) -> Iterator[None]:
        """What a subshell sets is lost with it, and `exit` leaves it alone."""
        before = dict(self.variables.values)
        try:
            yield
        except Left:
            if not is_subshell:
                raise
        if is_subshell:
            self.variables.values = before

    def decided(self, found: bool | Problem, line: int) -> bool | None:
        if isinstance(found, bool):
            return found
        self.unknown = Problem(f"line {line}, which needs a shell" if not found.text else f"line {line} ({found.text})")
        return None

    def declare(self, raw: Sequence[RawWord]) -> bool:
        if any(re.fullmatch(r"-\w*A\w*", one.text) for one in raw):
            for one in raw:
                if name := re.match(r"[A-Za-z_]\w*", one.text):
                    why = f"line {one.line}: {name[0]} is an associative array, which is not read here"
                    self.variables.values[name[0]] = Word(problem=Problem(f"{why}; {ADVICE}"))
            return True
        for one in raw:
            if one.array is not None or ASSIGNMENT.match(one.text):
                self.assign(one)
        return True

    def assign(self, word: RawWord) -> None:
        found = ASSIGNMENT.match(word.text)
        assert found is not None, "the word is an assignment"
        name, index, appends = found[1], found[2], bool(found[3])
        old = self.variables.values.get(name)
        value: Word | list[Word]
        if word.array is not None:
            elements = [element for one in word.array for element in self.variables.expand(one)]
            value = [*(old if isinstance(old, list) else [old] if old else []), *elements] if appends else elements
        else:
            written = word.text[found.end() :]
            home = self.variables.values.get("HOME")
            if re.match(r"~(/|$)", written) and isinstance(home, Word):
                written = home.text + written[1:]
            value = self.variables.text(written, word.line)
            if appends and isinstance(old, Word):
                value = Word(old.text + value.text, old.problem or value.problem)
            elif appends and old:
                value = Word(problem=Problem(f"line {word.line}: {word.text} is not read here; {ADVICE}"))
        if index is not None:
            place = self.variables.text(index[1:-1], word.line).text
            elements = list(old) if isinstance(old, list) else [old] if old else []
            if not place.isdigit() or int(place) > len(elements) or isinstance(value, list):
                value = Word(problem=Problem(f"line {word.line}: {word.text} is not read here; {ADVICE}"))
            else:
                elements[int(place) : int(place) + 1] = [value]
                value = elements
        self.set(name, value, word.line)

    def set(self, name: str, value: Word | list[Word], line: int) -> None:
        """Set a variable; its value is not known if it is not known whether the statement runs."""
        if name in self.variables.fixed:
            return
        if self.unsure is not None and value != self.variables.values.get(name):
            hint = "" if "--set" in self.unsure.text else f"; give it with --set {name}=VALUE"
            value = Word(problem=Problem(f"line {line}: {name} depends on {self.unsure.text}{hint}"))
        elif (
            isinstance(value, Word) and (problem := value.problem) and not problem.unset and "--set" not in problem.text
        ):
            value = Word(problem=Problem(f"{problem.text}; give {name} with --set {name}=VALUE"))
        self.variables.values[name] = value

    def leave(self, words: Sequence[Word], line: int) -> bool:
        """`exit`, `return`, `break` and `continue`."""
        if self.unsure is None:
            number = words[1].text if len(words) > 1 else "1"
            raise Left(words[0].text, line, int(number) if number.isdigit() else 1)
        return True

    def expanded(self, words: Sequence[Word], line: int) -> bool:
        """A command whose words were expanded, and that does nothing more."""
        if self.unsure is None and self.variables.required:
            raise Left("exit", line)
        return True

    def failed(self, words: Sequence[Word], line: int) -> bool:
        return False

    def unset(self, words: Sequence[Word], line: int) -> bool:
        for word in words[1:]:
            if self.unsure is None and word.text not in self.variables.fixed:
                self.variables.values.pop(word.text, None)
            elif word.text in self.variables.values:
                self.set(word.text, Word(), line)
        return True

    def shift(self, words: Sequence[Word], line: int) -> bool | None:
        number = int(words[1].text) if len(words) > 1 and words[1].text.isdigit() else 1
        return self.arguments([Word(), Word("--"), *(self.variables.arguments or [])[number:]], line)

    def arguments(self, words: Sequence[Word], line: int) -> bool:
        """`set -- a b`; `set` with options alone changes none."""
        if len(words) > 1 and words[1].text == "--":
            why = self.unsure and Problem(f"line {line}: the arguments depend on {self.unsure.text}")
            self.variables.arguments = [Word(problem=why)] if why else list(words[2:])
        return True

    def printed(self, words: Sequence[Word], line: int) -> bool | None:
        """`printf`, which sets a variable with -v."""
        return self.filled(words[1:3], line) if len(words) > 2 and words[1].text == "-v" else self.expanded(words, line)

    def computed(self, words: Sequence[Word], line: int) -> bool | None:
        """`let`, which sets what its expressions set."""
        for word in words[1:]:
            self.variables.arithmetic(word.text, line)
        return self.filled((), line)

    def filled(self, words: Sequence[Word], line: int) -> bool | None:
        """`read` and others that set variables from what is not known here."""
        self.unknown = Problem(f"line {line}, which needs a shell")
        with self.perhaps(self.unknown):
            for word in words[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", word.text):
                    self.set(word.text, Word("?"), line)
        return None


Builtin = Callable[[Shell, Sequence[Word], int], bool | None]
BUILTINS: dict[str, Builtin] = {
    **dict.fromkeys(("exit", "return", "break", "continue"), Shell.leave),
    **dict.fromkeys((":", "true", "echo", "trap", "ulimit", "cd"), Shell.expanded),
    "printf": Shell.printed,
    "let": Shell.computed,
    "false": Shell.failed,
    "unset": Shell.unset,
    "shift": Shell.shift,
    "set": Shell.arguments,
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts"), Shell.filled),
}
