"""SiteLinks of pages whose texts are also read in the repository: what is a page of the site is linked there, and other
files are linked in the repository, if the site knows its address."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])+)\]\((?P<target>[^()\s]+)\)")
FENCE = re.compile(r"(?ms)^(\s*```.*?^\s*```\s*$)")


@dataclass(frozen=True, slots=True)
class SiteLinks:
    pages: Mapping[str, str]
    """The page for each file of the repository that has one: `recipes/tiny/RECORD.md` has `recipes/tiny.md`."""
    repository: str = ""
    """The address of the files, such as `https://host/owner/name/blob/main`; empty if the site has none."""
    sources: dict[str, str] = field(default_factory=dict)
    """The file of each page; a page without one is made by a program."""

    def __post_init__(self) -> None:
        self.sources.update({page: source for source, page in self.pages.items()})

    def rewritten(self, markdown: str, page: str) -> str:
        """The text of a page with the links of its file."""
        source = self.sources.get(page, posixpath.join("docs", page))

        def link(found: re.Match[str]) -> str:
            target, hashed, anchor = found["target"].partition("#")
            if not target or ":" in target:
                return found[0]
            path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
            if path == "docs/configuration/index.md" and anchor:  # a section, which has a page of its own on the site
                there: str | None = f"configuration/{anchor}.md"
                hashed = anchor = ""
            elif path.startswith("docs/"):
                there = path.removeprefix("docs/")
            else:
                there = self.pages.get(path)
            if there is not None and there != page:
                relative = posixpath.relpath(there, posixpath.dirname(page) or ".")
                return f"[{found['text']}]({relative}{hashed}{anchor})"
            return f"[{found['text']}]({self.repository}/{path})" if self.repository else found["text"]

        parts = FENCE.split(markdown)
        return "".join(part if index % 2 else LINK.sub(link, part) for index, part in enumerate(parts))
