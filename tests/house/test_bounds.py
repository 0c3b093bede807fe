"""Every room, the periphery's share of the lines, and the documentation have a bound.

`room_bounds.json` has the bounds. A bound is raised by a line in CHANGELOG.md that says why, and in no other way:

    - Bound of `megatron_rl/loop`: 3,100, from 2,900: an epoch is a list of passes.

`python tests/house/test_bounds.py` lowers each bound to today's number.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pytest
from pages import ROOT, num_words

BOUNDS = Path(__file__).with_name("room_bounds.json")
PERIPHERY = (
    *(f"megatron_rl/{name}" for name in ("convert", "explain", "migrate", "observe", "planning", "preflight", "trl")),
    "tools",
)
"""What is not a part of training: conversion, plans and checks before a run, views of a run, doors, benchmarks."""
SHARE = "percent of the lines in the periphery"
WORDS = {
    "words of docs": ("docs/*.md",),
    "words of records": ("recipes/*/RECORD.md",),
    "words of rooms' READMEs": ("megatron_rl/*/README.md", "slurm/README.md"),
}
RAISED = re.compile(
    r"^- Bound of `(?P<name>[^`]+)`: (?P<now>[\d.,]+), from (?P<before>[\d.,]+): (?P<why>\S.{15,})$", re.M
)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def tracked() -> list[Path]:
    """The files that belong to the repository, new ones included."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return [path for name in listed if (path := ROOT / name).is_file() and not path.is_symlink()]


def room_of(path: Path) -> str | None:
    """The room of a source file; None if it is none."""
    parts = path.relative_to(ROOT).parts
    if path.suffix != ".py" or parts[0] not in ("megatron_rl", "recipes", "tools", "slurm"):
        return None
    return "/".join(parts[:2]) if parts[0] == "megatron_rl" and len(parts) > 2 else parts[0]


def measured(files: Iterable[Path]) -> dict[str, float]:
    """Lines of each room, the share of the periphery, and words."""
    numbers: dict[str, float] = {}
    for path in files:
        if room := room_of(path):
            numbers[room] = numbers.get(room, 0) + len(path.read_text().splitlines())
        for name, patterns in WORDS.items():
            if any(fnmatch(path.relative_to(ROOT).as_posix(), pattern) for pattern in patterns):
                numbers[name] = numbers.get(name, 0) + num_words(path)
    rooms = {name: number for name, number in numbers.items() if name not in WORDS}
    periphery = sum(number for name, number in rooms.items() if name in PERIPHERY)
    return numbers | {SHARE: round(100 * periphery / sum(rooms.values()), 1)}


def raised(bounds: dict[str, float], changelog: str) -> dict[str, float]:
    """The bounds after the changelog's lines, whose newest one is the first.

    Raises:
        ValueError: a line raises a bound that does not exist, or from another number than its bound has by then.
    """
    now = dict(bounds)
    for line in reversed([*RAISED.finditer(changelog)]):
        new, before = (float(line[number].replace(",", "")) for number in ("now", "before"))
        if now.get(line["name"]) != before:
            raise ValueError(f"CHANGELOG.md: {line[0]!r}: the bound was {now.get(line['name'])}, and not {before:g}")
        now[line["name"]] = new
    return now


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there is no history")
def test_every_room_and_the_documentation_keep_their_bounds():
    bounds = raised(json.loads(BOUNDS.read_text()), (ROOT / "CHANGELOG.md").read_text())
    numbers = measured(tracked())
    assert numbers.keys() == bounds.keys(), f"give a new room its bound in {BOUNDS.name}"
    over = [f"{name}: {n:,g}, above {bounds[name]:,g}" for name, n in numbers.items() if n > bounds[name]]
    assert not over, f"{'; '.join(over)}: make it smaller, or raise its bound by a line of CHANGELOG.md that says why"


def test_a_bound_is_raised_only_by_a_line_that_says_why():
    lines = ["- Bound of `a`: 7,000, from 6,100: why", "- Bound of `a`: 6,100, from 6,000: the bench of pushes"]
    assert raised({"a": 6000}, "\n".join([*lines, "- Bound of `a`: 8,000"])) == {"a": 6100}
    two = "- Bound of `a`: 5, from 3.5: another good reason\n- Bound of `a`: 3.5, from 2: a reason of words"
    assert raised({"a": 2, "b": 1}, two) == {"a": 5, "b": 1}
    with pytest.raises(ValueError, match="the bound was 2, and not 99"):
        raised({"a": 2}, "- Bound of `a`: 999, from 99: a reason of many words")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there is no history")
def test_the_file_of_bounds_only_lowers_them():
    name = BOUNDS.relative_to(ROOT).as_posix()
    now = json.loads(BOUNDS.read_text())
    for commit in git("log", "--format=%H", "--", name).split():
        earlier = json.loads(git("show", f"{commit}:{name}") or "{}")
        assert not {room for room in now if now[room] > earlier.get(room, now[room])}, "raise them in CHANGELOG.md"


if __name__ == "__main__":
    known, now = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}, measured(tracked())
    lower = {name: min(number, known.get(name, number)) for name, number in now.items()}
    BOUNDS.write_text(json.dumps(lower, indent=1, sort_keys=True) + "\n")
