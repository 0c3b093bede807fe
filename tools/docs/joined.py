"""Until the guides are joined: pages of the navigation that are not there yet are left out, old pages stay in it, and
links to missing pages are plain text. This file goes when they are."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import Files

from megatron_rl.tools.docs.links import LINK

DOCS = Path(__file__).resolve().parents[2] / "docs"
MOVED = {"configuration.md": "configuration/index.md", "gpus.md": "status.md"}


def present(nav: Any, made: set[str]) -> list[Any]:
    kept = _kept(nav, made)
    named = set(re.findall(r"[\w/]+\.md", str(kept)))
    return [*kept, {"Old": [name for name in sorted(path.name for path in DOCS.glob("*.md")) if name not in named]}]


def _kept(nav: Any, made: set[str]) -> Any:
    if isinstance(nav, str):
        return nav if nav in made or (DOCS / nav).exists() else None
    if isinstance(nav, dict):
        return {title: kept for title, inside in nav.items() if (kept := _kept(inside, made))}
    return [kept for one in nav if (kept := _kept(one, made))]


def without_missing(markdown: str, page: str, files: Files) -> str:
    def link(found: re.Match[str]) -> str:
        target, hashed, anchor = found["target"].partition("#")
        if not target or ":" in target or not target.endswith(".md"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if path in MOVED and "configuration" not in page:
            return f"[{found['text']}]({posixpath.relpath(MOVED[path], posixpath.dirname(page) or '.')})"
        return found[0] if files.get_file_from_path(path) else found["text"]

    return LINK.sub(link, markdown)
