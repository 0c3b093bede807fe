"""A call of verl's trainer: Hydra's options and the overrides, from the words behind the trainer's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

from megatron_rl.migrate.verl.expansion import Problem, Word
from megatron_rl.migrate.verl.lexer import ScriptError

OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w./@-]*)(?:=(.*))?", re.DOTALL)
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
    notes: list[str] = field(default_factory=list)
    """What the script does before the call that is not read here."""


def read_overrides(words: Sequence[str]) -> VerlCall:
    """The overrides that are given without a script; their line is 0.

    Raises:
        ScriptError: a word is no override.
    """
    call = VerlCall("verl.trainer.main_ppo", 0)
    take(call, [(Word(word), 0) for word in words])
    return call


def take(call: VerlCall, words: Sequence[tuple[Word, int]], required: Sequence[Problem] = ()) -> None:
    """Add the words after the module to a call: Hydra's options and overrides."""
    unset = [*required, *(word.problem for word, _ in words if word.problem is not None and word.problem.is_unset)]
    if unset:
        raise UnsetVariables(reduce(Problem.and_also, unset))
    place, unknown = 0, []
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
            if word.problem is not None:
                unknown.append(word.problem.text)
                continue
            if word.text.isspace():  # of a backslash before the spaces that end a line; see `_lost` in shell.py
                continue
            where = f"line {line}: " if line else ""
            raise ScriptError(f"{where}{word.text!r} is no override of the form key=value; correct or remove it")
        problem = word.problem.text if word.problem else None
        call.overrides.append(Override(found[2], found[3] or "", line, found[1], problem))
    if unknown:
        raise ScriptError("\n".join(dict.fromkeys(unknown)))
