"""The configuration as pages, one for each section: what `megatron-rl config --markdown` prints, with everything that
is the same in several places printed once.

Invariant (tests/house/test_site.py): every key of every section is on a page, or a page says where its twin is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.reference import Heading, Key, parts, plain

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


def twin(key: Key) -> Twin:
    return Twin(key.path.rpartition(".")[2], key.type, key.default, key.meaning)


def sections() -> list[str]:
    """The names of the sections, in the order of the reference."""
    return list(dict.fromkeys(part.path.partition(".")[0].partition("[")[0] for part in parts()))


def pages() -> dict[str, str]:
    """The text of each page by the name of its file. If keys are marked as advanced, `advanced.md` has
    them."""
    named = {key.path for part in parts() for key in part.keys}
    written = {name: _page(name, list(_common_first(_of(name))), named) for name in sections()}
    advanced = [Heading(part.path, "", keys) for part in parts() if (keys := tuple(filter(is_advanced, part.keys)))]
    if advanced:
        written["advanced"] = _page("advanced", advanced, named)
    return {f"{name}.md": text for name, text in written.items()}


def is_advanced(key: Key) -> bool:
    return bool(getattr(key, "advanced", False))


def _of(section: str) -> list[Heading]:
    found = [part for part in parts() if re.match(rf"{section}(\.|\[|$)", part.path)]
    return [replace(part, keys=tuple(key for key in part.keys if not is_advanced(key))) for part in found]


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


def _page(section: str, shown: Sequence[Heading], named: Iterable[str]) -> str:
    """
    Args:
        named: the paths of all keys; a key that a text names in backticks becomes a link.
    """
    seen: dict[Twin, str] = {}
    blocks = [f"# {section.capitalize()}" if section == "advanced" else f"# `{section}`"]
    if section in LINKED:
        blocks.append(LINKED[section])
    copies = [part for part in shown if part.same_as]
    for part in shown:
        if not part.same_as:
            blocks += _blocks(section, part, seen)
    if copies:
        lines = [f"- `{part.path}`: {_anchor_link(section, part.same_as)}" for part in copies]
        blocks.append("\n\n".join(["## The same keys as elsewhere", "\n".join(lines)]))
    return _linked("\n\n".join(blocks), section, frozenset(named)) + "\n"


def _blocks(section: str, part: Heading, seen: dict[Twin, str]) -> Iterator[str]:
    if part.path != section:
        yield f"## `{part.path}` {{ #{part.path.replace('[', '-').rstrip(']')} }}"
    if meaning := FORMULA.sub("", part.meaning):
        yield meaning
    lines, again = [], dict[str, list[str]]()
    for key in part.keys:
        same = twin(key)
        if place := seen.get(same):
            again.setdefault(place, []).append(f"`{same.name}`")
        else:
            seen[same] = part.path
            lines.append(_line(key))
    common = part.path.rpartition("[")[0]
    for place, names in again.items():
        if place != common:
            lines.append(f"- {', '.join(names)}: as in {_anchor_link(section, place)}.")
    if lines:
        yield "\n".join(lines)


def _line(key: Key) -> str:
    default = "required" if key.default is None else f"`{key.default}`"
    target = key.path.replace("[", "-").replace("]", "")
    return f"- **`{key.path.rpartition('.')[2]}`**{{ #{target} }} ({key.type}; {default}). {key.meaning}".rstrip()


def _anchor_link(section: str, path: str) -> str:
    page = path.partition(".")[0].partition("[")[0]
    anchor = "" if page == path else f"#{path.replace('[', '-').rstrip(']')}"
    return f"[`{path}`]({anchor if page == section and anchor else f'{page}.md{anchor}'})"


def _linked(text: str, section: str, named: frozenset[str]) -> str:
    def key(found: re.Match[str]) -> str:
        path = found[1]
        page = path.partition(".")[0]
        if path not in named:
            return found[0]
        return f"[`{path}`]({'' if page == section else f'{page}.md'}#{path})"

    lines = [line if line.startswith("#") else NAMED.sub(key, line) for line in text.splitlines()]
    return DOCUMENT.sub(r"[\1](../\1.md)", "\n".join(lines))
