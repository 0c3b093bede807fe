"""The code blocks of the documents, and how each is run.

The line before a block says it: `<!-- run -->`, `<!-- file: NAME -->`, `<!-- keys -->`, `<!-- shows -->`, or
`<!-- not run: REASON -->`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tutorials").glob("*.md"))]
GENERATED = {"metrics.md", "coming_from_trl.md"}
MARK = re.compile(r"<!-- (run|keys|shows|file: [\w./-]+|not run: \S.*) -->")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Of the opening fence, counted from 1."""
    language: str
    text: str
    mark: str
    """The comment's text; empty if there is none."""

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block is written to."""
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    found, lines, opened = [], page.read_text().splitlines(), None
    for number, line in enumerate(lines):
        fence = re.fullmatch(r"\s*```(.*)", line)
        if fence is None:
            continue
        if opened is None:
            opened = number
            continue
        before = lines[opened - 1] if opened else ""
        mark = MARK.fullmatch(before.strip())
        language = lines[opened].strip().removeprefix("```").split(" ")[0]
        text = "\n".join(lines[opened + 1 : number]) + "\n"
        found.append(Block(page, opened + 1, language, text, mark[1] if mark else ""))
        opened = None
    return found


def num_words(page: Path) -> int:
    """The words of a page outside its code blocks."""
    text = re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", page.read_text())
    return len(re.sub(r"<!--.*?-->", "", text).split())
