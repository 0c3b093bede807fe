"""The measured numbers of README.md and docs/index.md come from `docs/numbers.json`, which a command writes.

python -m megatron_rl.tools.docs.numbers store NAME RESULT.json...      what the entry's command has printed with --json
python -m megatron_rl.tools.docs.numbers check                          what the pages say otherwise

An entry names its command, the place of its number in the results, and the words that a page must have:
`{low} to {high}`, `{first}`, `{last}`, or `{0}`, `{1}` and so on for single results. An entry without a command has
`record`, the page on which a person has written what was seen. Every other number on the two pages is a size, a version
or a name, and `names` lists these; a number that is neither is an error.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from megatron_rl.tools.docs import recipes

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ROOT / "docs/numbers.json"
PAGES = ("README.md", "docs/index.md")
NOT_PROSE = re.compile(r"(?ms)^\s*```.*?^\s*```\s*$|<!--.*?-->|`[^`]*`|\]\([^)]*\)")
"""Blocks of code, comments, code in a line, and the targets of links."""
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![.,]?\w|-)")


def phrase(entry: dict[str, Any]) -> str:
    """The words that a page has, with the numbers of the entry."""
    results, form = entry["results"], entry.get("form", "")
    shown = [format(number, form).replace("e-0", "e-") for number in results]
    named = {"low": format(min(results), form), "high": format(max(results), form)}
    text: str = entry["says"]
    return text.format(*shown, **named, first=shown[0], last=shown[-1])


def differences(pages: Sequence[str] = PAGES) -> list[str]:
    """One line for each number that a page has and `docs/numbers.json` has not, and the other way round."""
    known = json.loads(NUMBERS.read_text())
    texts = {page: " ".join(NOT_PROSE.sub("|", (ROOT / page).read_text()).split()) for page in pages}
    found = []
    for entry in known["measured"]:
        for page in entry["pages"]:
            if page in texts and phrase(entry) not in texts[page]:
                found.append(f"{page} does not say {phrase(entry)!r}, as {entry['name']} does")
    phrases = [phrase(entry) for entry in known["measured"]] + known["names"] + list(_nodes())
    for page, text in texts.items():
        for words in sorted(phrases, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.,-]){re.escape(words)}(?![\w-])", "|", text)
        found += [f"{page} has the number {number}, which is not in {NUMBERS.name}" for number in NUMBER.findall(text)]
    return found


def _nodes() -> Iterator[str]:
    """The nodes of each recipe, as the table of models has them: `: 4, 8, LoRA 1`."""
    for folder in recipes.folders():
        found: dict[bool, set[int]] = {False: set(), True: set()}
        for one in recipes.planned(folder):
            found["LoRA" in one.algorithm].add(one.num_nodes)
        texts = [", ".join(map(str, sorted(found[False])))] if found[False] else []
        texts += [f"LoRA {', '.join(map(str, sorted(found[True])))}"] if found[True] else []
        yield f": {', '.join(texts)}"


def store(name: str, files: Sequence[Path]) -> None:
    """Put what a command has printed into the entry `name`, with the day and the commit."""
    known = json.loads(NUMBERS.read_text())
    [entry] = [entry for entry in known["measured"] if entry["name"] == name]
    entry["results"] = [number for file in files for number in _numbers(json.loads(_last_line(file)), entry["path"])]
    entry["commit"] = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    entry["date"] = date.today().isoformat()
    NUMBERS.write_text(written(known))


def written(known: dict[str, Any]) -> str:
    """The file's text: an entry a line."""
    entries = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in known["measured"])
    return f'{{\n "measured": [\n{entries}\n ],\n "names": {json.dumps(known["names"], ensure_ascii=False)}\n}}\n'


def _last_line(file: Path) -> str:
    text = file.read_text()
    try:
        json.loads(text)
    except ValueError:
        return text.splitlines()[-1]
    return text


def _numbers(result: Any, path: str) -> Iterator[float]:
    """The numbers at a path such as `modes/max_lag 1/tokens_per_s : modes/static/tokens_per_s`: the first place
    divided by the second one; lists are divided number by number. `-1` is the last entry of a list."""
    above, _, below = path.partition(" : ")
    tops = _listed(_at(result, above))
    bottoms = _listed(_at(result, below)) if below else [1.0] * len(tops)
    for top, bottom in zip(tops, bottoms, strict=True):
        yield round(top / bottom, 6)


def _listed(found: Any) -> list[float]:
    return [float(number) for number in (found if isinstance(found, list) else [found])]


def _at(result: Any, place: str) -> Any:
    for key in place.split("/"):
        result = result[int(key)] if isinstance(result, list) else result[key]
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["store", "check"])
    parser.add_argument("name", nargs="?", help="the entry of docs/numbers.json")
    parser.add_argument("files", nargs="*", type=Path, help="what its command has printed")
    given = parser.parse_args(arguments)
    if given.task == "store":
        store(given.name, given.files)
        return 0
    print("\n".join(found := differences()) or "the pages have the numbers of docs/numbers.json")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
