"""The configuration as pages, one for each section: what `megatron-rl config --markdown` prints, with everything that
is the same in several places printed once. Keys that no recipe sets are on one page for all sections.

Invariant (tests/house/test_site.py): every key of every section is on a page, or a page says where its twin is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.reference import Heading, Key, parts, plain

ADVANCED = "advanced"
FORMULA = re.compile(r" Formula: .*?(?=( Aggregation: [\w-]+\.)?$)")
"""It is on the page of the algorithms, as mathematics."""
NAMED = re.compile(r"(?<!\[)`([a-z_]+(?:\.[a-z_]+)+)`")
DOCUMENT = re.compile(r"(?<![\w/(])docs/([\w/]+)\.md")
LINKED = {"algorithm": "Formulas are on the page [Algorithms](../algorithms.md)."}


@dataclass(frozen=True, slots=True)
class Twin:
    """What makes two keys one: all that is printed of them."""

    name: str
    type: str
    default: str | None
    meaning: str


OFFLINE = ("dpo", "reward_model")
"""Sections with keys of `sft`, which is the page that describes them."""


def twin(key: Key) -> Twin:
    return Twin(key.path.rpartition(".")[2], key.type, key.default, key.meaning)


def sections() -> list[str]:
    """The names of the sections, in the order of the reference."""
    return list(dict.fromkeys(_first_name(part.path) for part in parts()))


def pages() -> dict[str, str]:
    """The text of each page by the name of its file."""
    of_sft = {twin(key): part.path for part in _of("sft") for key in part.keys}
    places = {
        key.path: ADVANCED if key.is_advanced else _first_name(key.path)
        for part in parts()
        for key in part.keys
        if _first_name(key.path) not in OFFLINE or twin(key) not in of_sft
    }
    written = {
        name: _page(name, list(_common_first(_of(name))), places, of_sft if name in OFFLINE else {})
        for name in sections()
    }
    advanced = [
        Heading(part.path, "", keys) for part in parts() if (keys := tuple(key for key in part.keys if key.is_advanced))
    ]
    written[ADVANCED] = _page(ADVANCED, advanced, places)
    return {f"{name}.md": text for name, text in written.items()}


def _first_name(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


def _of(section: str) -> list[Heading]:
    return [part for part in parts() if _first_name(part.path) == section]


def _common_first(shown: Sequence[Heading]) -> Iterator[Heading]:
    """The same headings. Before the kinds of a section comes one with the keys that all of them have."""
    kinds: dict[str, list[Heading]] = {}
    for part in shown:
        if part.path.endswith("]") and not part.same_as:
            kinds.setdefault(part.path.rpartition("[")[0], []).append(part)
    for part in shown:
        name = part.path.rpartition("[")[0] if part.path.endswith("]") else None
        group = kinds.pop(name, []) if name else []
        if len(group) > 2 and (common := _shared(group)):
            yield Heading(name or "", "All kinds have these keys:", common)
        yield part


def _shared(group: Sequence[Heading]) -> tuple[Key, ...]:
    """The keys that all kinds have, with the same words."""
    first, *others = ({twin(key): key for key in part.keys} for part in group)
    return tuple(
        replace(key, path=plain(key.path)) for same, key in first.items() if all(same in other for other in others)
    )


def _page(section: str, shown: Sequence[Heading], places: Mapping[str, str], elsewhere: Mapping[Twin, str] = {}) -> str:
    """
    Args:
        places: the page of each key; a key that a text names in backticks becomes a link.
        elsewhere: keys that another page has described, with the paths of their sections.
    """
    seen = dict(elsewhere)
    blocks = ["# Advanced keys\n\nNo recipe sets these keys." if section == ADVANCED else f"# `{section}`"]
    if section in LINKED:
        blocks.append(LINKED[section])
    copies = [part for part in shown if part.same_as]
    for part in shown:
        if not part.same_as:
            blocks += _blocks(section, part, seen)
    if copies:
        lines = [f"- `{part.path}`: {_anchor_link(section, part.same_as)}" for part in copies]
        blocks.append("\n\n".join(["## The same keys as elsewhere", "\n".join(lines)]))
    return _linked("\n\n".join(blocks), section, places) + "\n"


def _blocks(section: str, part: Heading, seen: dict[Twin, str]) -> Iterator[str]:
    if part.path != section:
        yield f"## `{part.path}` {{ #{_anchor(part.path)} }}"
    if meaning := FORMULA.sub("", part.meaning):
        yield meaning
    lines, again = [], dict[str, list[str]]()
    elsewhere = [key for key in part.keys if key.is_advanced and section != ADVANCED]
    for key in part.keys:
        same = twin(key)
        if key in elsewhere:
            continue
        if place := seen.get(same):
            again.setdefault(place, []).append(f"`{same.name}`")
        else:
            seen[same] = part.path
            lines.append(_line(key))
    common = part.path.rpartition("[")[0]
    for place, names in again.items():
        if place != common:
            lines.append(f"- {', '.join(names)}: as in {_anchor_link(section, place)}.")
    if elsewhere:
        links = ", ".join(f"[`{twin(key).name}`]({ADVANCED}.md#{_anchor(part.path)})" for key in elsewhere)
        lines.append(f"- Advanced: {links}.")
    if lines:
        yield "\n".join(lines)


def _line(key: Key) -> str:
    name = key.path.rpartition(".")[2]
    return f"- **`{name}`**{{ #{_anchor(key.path)} }} ({_told(key)}). {key.meaning}".rstrip()


def _told(key: Key) -> str:
    """The type and the default. A key that is null if it is left out is optional."""
    kind = key.type.replace("` or `", "`, `")
    if key.default is None:
        return f"{kind}; required"
    if key.default == "null" and kind.endswith(" or null"):
        return f"{kind.removesuffix(' or null')}; optional"
    return "section" if kind == "section" and key.default == "{}" else f"{kind}; `{key.default}`"


def _anchor(path: str) -> str:
    return path.replace("[", "-").replace("]", "")


def _anchor_link(section: str, path: str) -> str:
    page = _first_name(path)
    anchor = "" if page == path else f"#{_anchor(path)}"
    return f"[`{path}`]({anchor if page == section and anchor else f'{page}.md{anchor}'})"


def _linked(text: str, section: str, places: Mapping[str, str]) -> str:
    def key(found: re.Match[str]) -> str:
        page = places.get(found[1])
        if page is None:
            return found[0]
        return f"[`{found[1]}`]({'' if page == section else f'{page}.md'}#{_anchor(found[1])})"

    lines = [line if line.startswith("#") else NAMED.sub(key, line) for line in text.splitlines()]
    return DOCUMENT.sub(r"[\1](../\1.md)", "\n".join(lines))
