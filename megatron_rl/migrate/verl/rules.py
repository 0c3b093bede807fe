"""The rows of the table of verl's keys, and the judges that many rows share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl.migrate.verl.settings import Meaning, Settings

Judge = Callable[[Settings, str, Any], Meaning]
NUMBER = (int, float)
NO_CRITIC = "this estimator has no critic"


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


OFF: tuple[Any, ...] = (None, False, 0, "", [], {})


def refused(why: str, status: Literal["left out", "refused"] = "refused", harmless: tuple[Any, ...] = OFF) -> Shared:
    """Refused, unless the value is one of the harmless ones: null, false, 0 or empty."""

    def judge(settings: Settings, key: str, value: Any) -> Meaning:
        if value in harmless:
            return Meaning("implied", {}, "it is off")
        return Meaning(status, {}, why)

    return Shared(judge, f"{status}: {why}")


def never(why: str) -> Shared:
    """Refused with every value, because false and 0 say something there too."""
    return refused(why, harmless=())


def left_out(why: str) -> Shared:
    """Left out, unless the value is null, false, 0 or empty: training is the same without it."""
    return refused(why, "left out")


def only(
    values: tuple[Any, ...], why: str, otherwise: str, status: Literal["left out", "refused"] = "refused"
) -> Shared:
    """Implied for these values; others are refused, or left out."""

    def judge(settings: Settings, key: str, value: Any) -> Meaning:
        if value is None or value in values:
            return Meaning("implied", {}, why)
        return Meaning(status, {}, otherwise)

    same = ", ".join(f"`{one}`" for one in values if one is not None)
    return Shared(judge, f"implied for {same}: {why}; others are {status}: {otherwise}")


def with_critic(judge: Judge) -> Shared:
    """The judge where the run has a critic; otherwise nothing reads the key."""

    def judged(settings: Settings, key: str, value: Any) -> Meaning:
        return judge(settings, key, value) if settings.has_critic else Meaning("implied", {}, NO_CRITIC)

    assert isinstance(judge, Shared), "its words are on the page"
    return Shared(judged, f"with a critic {judge.words}")


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
