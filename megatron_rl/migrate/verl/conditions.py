"""The value of `[ ... ]` and `[[ ... ]]`, or why only a shell knows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.migrate.verl.expansion import Problem, Variables, Word, matches
from megatron_rl.migrate.verl.lexer import Operator, RawWord

SIGNS = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}
NOT_KNOWN = Problem("")


def decide(tokens: Sequence[RawWord | Operator | Word], variables: Variables, line: int) -> bool | Problem:
    """Whether the test holds.

    Args:
        tokens: of `[[ ... ]]` the tokens as they are written; of `[ ... ]` its words, which are expanded already.
    """
    test = _Test([one for one in tokens if not isinstance(one, Operator) or one.text != "\n"], variables, line)
    found = test.either()
    return found if test.place == len(test.tokens) else NOT_KNOWN


@dataclass(slots=True)
class _Test:
    tokens: Sequence[RawWord | Operator | Word]
    variables: Variables
    line: int
    place: int = 0

    def either(self) -> bool | Problem:
        found = self._both()
        while self._at("||", "-o"):
            self.place += 1
            other = self._both()
            found = True if found is True or other is True else found if isinstance(found, Problem) else other
        return found

    def _both(self) -> bool | Problem:
        found = self._one()
        while self._at("&&", "-a"):
            self.place += 1
            other = self._one()
            found = False if found is False or other is False else found if isinstance(found, Problem) else other
        return found

    def _one(self) -> bool | Problem:
        if self._at("!"):
            self.place += 1
            found = self._one()
            return found if isinstance(found, Problem) else not found
        if self._at("("):
            self.place += 1
            found = self.either()
            self.place += 1
            return found
        start = self.place
        while self.place < len(self.tokens) and not self._at("&&", "||", "(", ")", *(("-a", "-o") if start else ())):
            self.place += 1
            if self.place - start > 1 and self._at("-a", "-o"):
                break
        return self._compared(self.tokens[start : self.place])

    def _at(self, *texts: str) -> bool:
        return self.place < len(self.tokens) and self.tokens[self.place].text in texts

    def _compared(self, tokens: Sequence[RawWord | Operator | Word]) -> bool | Problem:
        words: list[Word] = []
        for number, token in enumerate(tokens):
            if not isinstance(token, RawWord):
                words.append(token if isinstance(token, Word) else Word(token.text))
            elif number == 2 and tokens[1].text in ("=", "==", "!="):
                words.append(self.variables.pattern(token.text, token.line))
            else:
                words.append(self.variables.text(token.text, token.line))
        for word in words:
            if word.problem is not None and not word.problem.is_unset:
                return word.problem
        is_pattern = bool(tokens) and isinstance(tokens[-1], RawWord)
        match [word.text for word in words]:
            case []:
                return False
            case ["-z", text]:
                return not text
            case ["-n", text] | [text]:
                return bool(text)
            case ["-v", name]:
                return name in self.variables.values
            case [left, "=" | "==" | "!=" as sign, right]:
                is_equal = matches(left, right) if is_pattern else left == right
                return is_equal == (sign != "!=")
            case [left, sign, right] if sign in SIGNS and re.fullmatch(r"-?\d+ -?\d+", f"{left} {right}"):
                return bool(SIGNS[sign](int(left), int(right)))
            case [left, "<" | ">" as sign, right]:
                return left < right if sign == "<" else left > right
            case _:
                return NOT_KNOWN
