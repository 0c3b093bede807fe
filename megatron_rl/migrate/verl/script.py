"""The call of verl in a run script, with the script's variables in place; no command of it is run.

Statements are followed from top to bottom, as bash does: conditions, `case`, loops and functions are decided where
their values are known. What a statement sets that only a shell could decide is not known, and a word of the call that
needs it is an error.

Invariants (tests/unit/tools): a script has exactly one call that is reached; every word after it is returned; an
override is never lost, also not behind a comment that ends the command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from megatron_rl.migrate.verl import grammar
from megatron_rl.migrate.verl.call import OVERRIDE, Override, UnsetVariables, VerlCall, take
from megatron_rl.migrate.verl.conditions import decide
from megatron_rl.migrate.verl.expansion import Problem, Variables, Word, matches
from megatron_rl.migrate.verl.grammar import Node, Parser
from megatron_rl.migrate.verl.lexer import Lexer, RawWord, ScriptError
from megatron_rl.migrate.verl.shell import ASSIGNMENT, BUILTINS, Left, Shell

MODULE = re.compile(r"[\w.]+\.main_(?:ppo|dapo)")
FILE = re.compile(r"[\w./-]*main_(?:ppo|dapo)\w*\.py")
DECLARING = ("export", "declare", "typeset", "local", "readonly")
SHOWING = ("echo", "printf", "ls", "cat", "vi", "vim", "which")
MOST_TURNS = 1000


def read_script(text: str, given: Mapping[str, str]) -> VerlCall:
    """The one call of `main_ppo` or `main_dapo` in a script.

    Args:
        given: the variables from outside: of the environment, and the user's own, which the script cannot change.

    Raises:
        UnsetVariables: variables of the call are not set.
        ScriptError: there is no call or more than one, or the script is incomplete.
    """
    reader = _Reader(Shell(Variables.of(given)))
    end = None
    try:
        reader.read(text)
    except Left as left:
        end = left
    if len(reader.calls) == 1:
        return reader.calls[0]
    if reader.calls:
        lines = ", ".join(str(call.line) for call in reader.calls)
        why = f"\n{reader.unsure_call.text}" if reader.unsure_call else ""
        raise ScriptError(
            f"the script calls verl {len(reader.calls)} times, in the lines {lines}; give one run a file{why}"
        )
    if end is not None:
        if reader.shell.variables.required:
            raise UnsetVariables(reduce(Problem.and_also, reader.shell.variables.required))
        raise ScriptError(f"line {end.line}: the script ends here, before it has called verl's trainer")
    raise ScriptError(
        "the script has no call such as `python3 -m verl.trainer.main_ppo key=value ...`; give the script that "
        "starts verl, or the overrides themselves"
    )


@dataclass(slots=True)
class _Reader:
    """Follows the statements, and takes the calls of verl's trainer among them."""

    shell: Shell
    calls: list[VerlCall] = field(default_factory=list)
    functions: dict[str, Node] = field(default_factory=dict)
    comments: Sequence[int] = ()
    unsure_call: Problem | None = None
    depth: int = 0
    notes: list[str] = field(default_factory=list)

    def read(self, text: str, line: int = 1) -> bool | None:
        lexer = Lexer(text.replace("\r\n", "\n"), line)
        tokens = lexer.tokens()
        self.comments = lexer.comments
        return self._run(Parser(tokens).script())

    def _run(self, nodes: Sequence[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            status = self._node(node)
        return status

    def _node(self, node: Node) -> bool | None:
        match node:
            case grammar.Simple(words):
                return self._simple(words)
            case grammar.Test(tokens, line):
                return self.shell.decided(decide(tokens, self.shell.variables, line), line)
            case grammar.Chain():
                return self._chain(node)
            case grammar.Pipe(members, is_negated):
                with self.shell.subshell(len(members) > 1):
                    status = [self._node(member) for member in members][-1]
                return status if status is None else status != is_negated
            case grammar.Compound(body, is_subshell):
                with self.shell.subshell(is_subshell):
                    return self._run(body)
                return None
            case grammar.If():
                return self._if(node)
            case grammar.Selection():
                return self._case(node)
            case grammar.For():
                return self._for(node)
            case grammar.While():
                return self._while(node)
            case grammar.Function(name, body):
                self.functions[name] = body
                return True

    def _chain(self, node: grammar.Chain) -> bool | None:
        status = self._node(node.first)
        for operator, member in node.rest:
            if status is None:
                with self.shell.perhaps(self.shell.unknown):
                    self._node(member)
            elif status == (operator == "&&"):
                status = self._node(member)
        return status

    def _if(self, node: grammar.If) -> bool | None:
        why: Problem | None = None
        for condition, body in node.clauses:
            with self.shell.perhaps(why):
                status = self._run(condition)
            if status is None:
                why = why or self.shell.unknown
            if status is not False:
                with self.shell.perhaps(why):
                    self._run(body)
            if status is True:
                return None if why else True
        with self.shell.perhaps(why):
            self._run(node.otherwise)
        return None if why else True

    def _case(self, node: grammar.Selection) -> bool | None:
        word = self.shell.variables.text(node.word.text, node.line)
        falls, why = False, _needed(word.problem, node.line)
        for patterns, body, end in node.clauses:
            found: bool | None = falls
            for pattern in () if falls else patterns:
                written = self.shell.variables.pattern(pattern.text, pattern.line)
                why = why or _needed(written.problem, node.line)
                found = found or (None if why else matches(word.text, written.text))
            if found is False:
                continue
            with self.shell.perhaps(why):
                self._run(body)
            falls = end == ";&"
            if found and end == ";;":
                break
        self.shell.unknown = why or self.shell.unknown
        return None if why else True

    def _for(self, node: grammar.For) -> bool | None:
        words = [word for raw in node.words or () for word in self.shell.variables.expand(raw)]
        why = next((_needed(word.problem, node.line) for word in words if word.problem), None)
        if node.words is None or why is not None:
            why = why or Problem(f"line {node.line}, which needs a shell")
            with self.shell.perhaps(why):
                self.shell.set(node.name, Word(), node.line)
                self._loop(node.body)
            return None
        for word in words:
            self.shell.set(node.name, word, node.line)
            if not self._loop(node.body):
                break
        return True

    def _while(self, node: grammar.While) -> bool | None:
        for _ in range(MOST_TURNS):
            status = self._run(node.condition)
            if status is None:
                with self.shell.perhaps(self.shell.unknown):
                    self._loop(node.body)
                return None
            if status == node.is_until or not self._loop(node.body):
                return True
        raise ScriptError(f"line {node.line}: the loop has more than {MOST_TURNS} turns; {grammar.ADVICE}")

    def _loop(self, body: Sequence[Node]) -> bool:
        """Follow the body once; returns whether the loop goes on."""
        try:
            self._run(body)
        except Left as left:
            if left.command not in ("break", "continue"):
                raise
            if left.loops > 1:
                raise Left(left.command, left.line, left.loops - 1) from left
            return left.command == "continue"
        return True

    def _simple(self, raw: Sequence[RawWord]) -> bool | None:
        number, line = 0, raw[0].line
        while number < len(raw) and (raw[number].array is not None or ASSIGNMENT.match(raw[number].text)):
            number += 1
        if number == len(raw):
            for one in raw:
                self.shell.assign(one)
            return True
        first = raw[number].text
        if first in DECLARING:
            return self.shell.declare(raw[number + 1 :])
        if first.startswith("(("):
            word = self.shell.variables.arithmetic(first[2:-2], line)
            return self.shell.decided(word.problem or word.text != "0", line)
        expand = self.shell.variables.expand
        words = [(word, one.line) for one in raw[number:] if one.array is None for word in expand(one)]
        texts = [word.text for word, _ in words]
        if not texts:
            return True
        start = _start(texts)
        if start is not None:
            self._call(words, start, raw[-1].line)
        elif texts[0] in self.functions:
            return self._function(texts[0], [word for word, _ in words[1:]], line)
        elif texts[0] in ("[", "test"):
            inside = [word for word, _ in words[1 : -1 if texts[0] == "[" else None]]
            return self.shell.decided(decide(inside, self.shell.variables, line), line)
        elif texts[0] in BUILTINS:
            return BUILTINS[texts[0]](self.shell, [word for word, _ in words], line)
        elif texts[0] == "eval":
            return self._evaluated([word for word, _ in words[1:]], line)
        elif texts[0] in ("source", "."):
            file = " ".join(texts[1:])
            self.notes.append(f"line {line}: the file of `source {file}` is not read; give what it sets with --set")
        elif texts[0] not in SHOWING:
            self._nested(words)
            self._lost(raw)
        self.shell.unknown = Problem(f"line {line}, which needs a shell")
        return None

    def _call(self, words: Sequence[tuple[Word, int]], start: int, last_line: int) -> None:
        call = VerlCall(words[start][0].text, words[start][1], last_line=last_line, notes=list(self.notes))
        take(call, words[start + 1 :], self.shell.variables.required)
        self.calls.append(call)
        if self.shell.unsure is not None:
            self.unsure_call = Problem(f"which of them runs depends on {self.shell.unsure.text}")

    def _function(self, name: str, arguments: list[Word], line: int) -> bool | None:
        if self.depth == 20:
            raise ScriptError(f"line {line}: {name} calls itself without an end; {grammar.ADVICE}")
        before, self.shell.variables.arguments = self.shell.variables.arguments, arguments
        self.depth += 1
        try:
            return self._node(self.functions[name])
        except Left as left:
            if left.command != "return":
                raise
            self.shell.unknown = Problem(f"line {left.line}, which needs a shell")
            return None
        finally:
            self.depth -= 1
            self.shell.variables.arguments = before

    def _nested(self, words: Sequence[tuple[Word, int]]) -> None:
        """A call inside of a quoted word, such as `bash -c "python3 -m verl.trainer.main_ppo ..."`."""
        for word, line in words:
            if re.search(r"\bmain_(ppo|dapo)\b", word.text) and re.search(r"\s", word.text):
                with self.shell.subshell(True):
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
            for word in self.shell.variables.expand(one):
                if (lost := OVERRIDE.fullmatch(word.text)) is not None:
                    self.calls[-1].overrides.append(Override(lost[2], lost[3] or "", one.line, lost[1], why))

    def _evaluated(self, words: Sequence[Word], line: int) -> bool | None:
        problem = next((word.problem for word in words if word.problem), None)
        if problem is not None:
            raise ScriptError(f"line {line}: `eval` of a text that is not known: {problem.text}")
        return self.read(" ".join(word.text for word in words), line)


def _needed(problem: Problem | None, line: int) -> Problem | None:
    """Why a statement is not decided; a variable that is not set is empty in bash."""
    return None if problem is None or problem.is_unset else Problem(f"line {line} ({problem.text})")


def _start(words: Sequence[str]) -> int | None:
    """The place of the trainer's module or file among the words of a command; None if there is none."""
    if words[0] in SHOWING:
        return None
    for place in range(1, len(words)):
        is_module = words[place - 1] == "-m" and MODULE.fullmatch(words[place])
        if is_module or FILE.fullmatch(words[place]):
            return place
    return None
