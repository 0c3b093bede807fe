"""The table of verl's keys (keys.yaml): which row a key has, what the row's words mean, and the page of them.

The words of a row; one of them says what becomes of the key:

    keys            patterns: `@` is actor_rollout_ref, and {a,b} stands for each name
    use: KEY        our key with the same meaning; `values` converts, `set` is ours if theirs is on, `usual` needs none
    by: FUNCTION    a function of one of conversion.py's MODULES; `here` says it in words
    same: WHY       training is the same with every value
    only: [...]     the values that change nothing here, and `why`; others are refused (`refuse`) or left out (`leave`)
    refuse, leave   refused, or left out with the same training, unless the value is null, false, 0 or empty
    never           refused with every value

`type` is what a value must be. `always` is verl's default, which enters the configuration where a script does not give
the key, and `default` one that does not; `=KEY` follows another key. `nulls`: null is allowed, or has a meaning.
`read`, `engine`, `lora`, `critic` and `owner` say when verl reads the key at all; `{owner}` is then policy or critic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

import yaml

KINDS: dict[str, tuple[type, ...]] = {
    **{"text": (str,), "bool": (bool,), "int": (int,), "list": (list,)},
    **{"number": (int, float), "bool int": (bool, int)},
}
ENGINES = {"dp": "FSDP", "megatron": "Megatron", "veomni": "VeOmni", "torchtitan": "TorchTitan"}
"""verl's engines -> the names of their trainers."""
RENAMED = {
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward_manager.name": "reward_model.reward_manager",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_model.": "reward_model.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.reward_manager.": "reward_manager.",
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "sandbox_fusion.": "reward_model.sandbox_fusion.",
    "critic.fsdp.": "critic.model.fsdp_config.",
}
"""New names of verl's keys -> the names that they had, which the table has. With a dot at the end it is a prefix."""
LIKE = 0.7
"""Two last parts that are less alike (from 0 to 1) have nothing in common."""


@dataclass(frozen=True, slots=True, eq=False)
class TableRow:
    pattern: str
    """A key, or a section with `.*`."""
    words: dict[str, Any]

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types that a value may have besides null; none means any."""
        return KINDS[self.words["type"]] if "type" in self.words else ()

    @property
    def default(self) -> Any:
        return self.words.get("always", self.words.get("default"))


def _written_out(pattern: str) -> Iterator[str]:
    """The keys of a pattern: `@` is actor_rollout_ref, and `{a,b}` stands for each name."""
    start = re.search(r"\{([^{}]*)\}", pattern)
    if start is None:
        yield re.sub(r"(?<!\w)@", "actor_rollout_ref.", pattern)
        return
    for name in start[1].split(","):
        yield from _written_out(pattern[: start.start()] + name + pattern[start.end() :])


def _patterns(words: dict[str, Any]) -> list[str]:
    return re.sub(r",\s+", ",", words["keys"]).split()


TABLE: dict[str, list[dict[str, Any]]] = yaml.safe_load((Path(__file__).parent / "keys.yaml").read_text())
"""The rows by the sections of the page."""
ROWS = tuple(
    TableRow(key, words)
    for rows in TABLE.values()
    for words in rows
    for pattern in _patterns(words)
    for key in _written_out(pattern)
)
BY_KEY = {row.pattern: row for row in reversed(ROWS)}
DEFAULTS = {row.pattern: row.default for row in ROWS if row.default is not None}


def old_name(key: str) -> str:
    """The name that a key had before verl renamed it."""
    for new, old in RENAMED.items():
        if key == new or (new.endswith(".") and key.startswith(new)):
            return old + key.removeprefix(new)
    return key


def row_of(key: str) -> TableRow | None:
    """The table's row for a key: its own row, or its nearest section's; None if verl has no such key."""
    if key in BY_KEY:
        return BY_KEY[key]
    if "@" in key:
        return BY_KEY["GROUP"]
    parts = key.replace("hydra/", "hydra.").split(".")
    sections = (".".join((*parts[:size], "*")) for size in range(len(parts) - 1, 0, -1))
    return next((BY_KEY[one] for one in sections if one in BY_KEY), None)


@cache
def nearest(key: str) -> str:
    """The key of verl that is most like a key that it does not have. The last parts are compared first, then the whole
    names."""
    last = key.rpartition(".")[2]

    def likeness(name: str) -> float:
        parts = SequenceMatcher(None, last, name.rpartition(".")[2]).ratio()
        return SequenceMatcher(None, key, name).ratio() + (2 * parts if parts > LIKE else 0)

    return max((name.removesuffix(".*") for name in BY_KEY), key=likeness)


HEAD = """# The keys of verl

All keys of verl that `megatron-rl from-verl` knows, and what becomes of them here; the [guide](coming_from_verl.md)
explains the words. `@` is actor_rollout_ref, `{a,b}` stands for each name, and `.*` is a section. A key with a default
in brackets enters the configuration also where a script does not give it. A key that verl does not have is refused,
with the nearest one that it has. This page is written by `megatron-rl from-verl --markdown`.
"""


def words_of(words: dict[str, Any]) -> str:
    """What becomes of a row's keys, in words."""
    if "by" in words:
        return str(words["here"])
    if "use" in words:
        return f"`{words['use'].replace('{owner}.', '').replace('{rest}', '')}`"
    if "same" in words:
        return f"implied: {words['same']}"
    status, other = ("left out", words["leave"]) if "leave" in words else ("refused", words.get("refuse"))
    if "only" in words:
        same = ", ".join(f"`{one}`" for one in words["only"]) or "null"
        return f"implied for {same}: {words['why']}; others are {status}: {other}"
    return f"{status}: {words.get('never', other)}"


def markdown() -> str:
    """The whole page."""
    engines = ", ".join(f"`{name}` ({trainer})" for name, trainer in ENGINES.items())
    lines = [HEAD, f"`model_engine` is one of {engines}; another one is an error.", ""]
    for section, rows in TABLE.items():
        lines += [f"## {section[0].upper()}{section[1:]}", "", "| verl | here |", "|---|---|"]
        for words in rows:
            always = words.get("always")
            default = f" ({always})" if always is not None and not str(always).startswith("=") else ""
            keys = ", ".join(f"`{pattern}`" for pattern in _patterns(words))
            lines.append(f"| {keys}{default} | {words_of(words)} |")
        lines.append("")
    lines += ["## New names", "", "verl has renamed these; both names are read.", ""]
    lines += ["| now | in the tables |", "|---|---|"]
    for new, old in RENAMED.items():
        star = "*" if new.endswith(".") else ""
        lines.append(f"| `{new}{star}` | `{old}{star}` |")
    return "\n".join(lines) + "\n"
