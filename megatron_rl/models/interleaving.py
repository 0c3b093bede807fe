"""Parameters of an engine that hold the rows of several HF tensors by turns: vLLM's experts of gpt-oss have a row of
gate, a row of up, and so on, in [experts, rows, ...].

Such a parameter is described as several: the name of each says which rows it means, as an index in Python does, for
example `w13_weight[:, 0::2]`. It has the rectangles of a parameter of its own, so plans need to know nothing of it.
Invariant (tests/ranks): the recording of vLLM's loaders equals the family's table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol, Self, TypeVar

_EVERY = re.compile(r"(.+)\[:, (\d+)::(\d+)\]")


class Indexed(Protocol):
    def __getitem__(self, index: tuple[slice, slice], /) -> Self: ...


T = TypeVar("T", bound=Indexed)


def every(name: str, first: int, step: int) -> str:
    """The name of every `step`-th row of a parameter, from row `first` on."""
    return f"{name}[:, {first}::{step}]" if step > 1 else name


def whole(name: str) -> str:
    """The name of the parameter that has the rows."""
    found = _EVERY.fullmatch(name)
    return found[1] if found else name


def part(name: str, parameter: T) -> T:
    """The rows that a name means, as a view of the parameter."""
    found = _EVERY.fullmatch(name)
    return parameter[:, int(found[2]) :: int(found[3])] if found else parameter


def described(live: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """The live parameters by the names that describe them: one that is described in parts is replaced by these."""
    parts = {name: whole(name) for name in names if whole(name) != name}
    found = {name: parameter for name, parameter in live.items() if name not in parts.values()}
    return found | {name: part(name, live[of]) for name, of in parts.items() if of in live}


def are_zeros(live: Iterable[str], names: Iterable[str]) -> list[str]:
    """The parameters that are zeros, because the outputs of several ranks are added up and the first rank has the
    values: biases of experts that no name describes."""
    known = set(map(whole, names))
    return [name for name in live if name.endswith("experts.w2_bias") and name not in known]
