"""The rows of the table of verl's keys, and the judges that many rows share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl.tools.verl.settings import Meaning, Settings

Judge = Callable[[Settings, str, Any], Meaning]
NUMBER = (int, float)


@dataclass(frozen=True, slots=True)
class KeyRule:
    pattern: str
    kinds: tuple[type, ...]
    """The types that a value may have besides null; none means any."""
    judge: Judge
    always: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """A judge that many rows have, with the words of docs/verl_keys.md."""

    judge: Judge
    words: str

    def __call__(self, settings: Settings, key: str, value: Any) -> Meaning:
        return self.judge(settings, key, value)


def used(target: str) -> Shared:
    """The value has the same meaning as our key `target`."""
    return Shared(lambda settings, key, value: Meaning("used", {target: value}), f"`{target}`")


def implied(why: str) -> Shared:
    return Shared(lambda settings, key, value: Meaning("implied", {}, why), f"implied: {why}")


def refused(why: str) -> Shared:
    """Not expressible, unless the value is null, false, 0 or empty."""

    def judge(settings: Settings, key: str, value: Any) -> Meaning:
        if value in (None, False, 0, "", [], {}):
            return Meaning("implied", {}, "it is off")
        return Meaning("not expressible", {}, why)

    return Shared(judge, f"not expressible: {why}")


def only(values: tuple[Any, ...], why: str, otherwise: str) -> Shared:
    """Implied for these values, not expressible for others."""

    def judge(settings: Settings, key: str, value: Any) -> Meaning:
        if value is None or value in values:
            return Meaning("implied", {}, why)
        return Meaning("not expressible", {}, otherwise)

    same = ", ".join(f"`{one}`" for one in values if one is not None)
    return Shared(judge, f"implied for {same}: {why}" + ("" if why == otherwise else f"; others: {otherwise}"))


def rows(kinds: tuple[type, ...], judge: Judge, *patterns: str, always: bool = False) -> tuple[KeyRule, ...]:
    """A row for each pattern. There `@` before a name is `actor_rollout_ref.`, and `{a,b}` a row for each name."""
    return tuple(KeyRule(one, kinds, judge, always) for pattern in patterns for one in _written_out(pattern))


def _written_out(pattern: str) -> list[str]:
    whole = re.sub(r"(?<![\w*])@", "actor_rollout_ref.", pattern)
    before, brace, rest = whole.partition("{")
    names, _, after = rest.partition("}")
    if not brace:
        return [whole]
    return [one for name in names.split(",") for one in _written_out(before + name + after)]
