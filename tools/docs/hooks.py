"""What mkdocs calls while it builds the site (`hooks` in mkdocs.yml).

Pages that are made here are nowhere in the repository: the commands, the sections of the configuration, the keys of
verl, the recipes and the tutorials. The others come from docs/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from megatron_rl.migrate.verl.keys import markdown as verl_keys
from megatron_rl.tools.docs import commands, configuration, recipes, tutorials
from megatron_rl.tools.docs.formulas import rendered
from megatron_rl.tools.docs.links import SiteLinks
from megatron_rl.tools.docs.numbers import differences

ROOT = Path(__file__).resolve().parents[2]
ALIASES = Path(__file__).with_name("aliases.yaml")
MARK = re.compile(r"(?m)^( *)<!-- (?:file: (?P<file>\S+)|not run: (?P<reason>.+)) -->\n\1(?P<fence>```\w+)$")
"""What is said of a code block in the line before it, which no browser shows."""


def made_pages() -> Iterator[tuple[str, str, str]]:
    """The path, the text and the source of each page; the source is a file of the repository, or empty."""
    yield "commands.md", commands.page(), "megatron_rl/__main__.py"
    yield "verl_keys.md", verl_keys(), "megatron_rl/migrate/verl/keys.yaml"
    for name, text in configuration.pages().items():
        yield f"configuration/{name}", text, ""
    yield "recipes/index.md", recipes.index(), "recipes/README.md"
    for folder in recipes.folders():
        yield f"recipes/{folder.name}.md", recipes.page_of(folder), f"recipes/{folder.name}/RECORD.md"
    for source in tutorials.sources():
        yield f"tutorials/{source.stem}.md", tutorials.page_of(source), f"tutorials/{source.name}"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    if different := differences():
        raise PluginError("README.md or docs/index.md differ from docs/numbers.json:\n" + "\n".join(different))
    aliases: dict[str, list[str]] = yaml.safe_load(ALIASES.read_text())
    config.extra["aliases"] = aliases
    config.edit_uri = "blob/main/docs/" if config.repo_url else None
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    sources: dict[str, str] = {}
    for path, text, source in made_pages():
        if (written := files.get_file_from_path(path)) is not None:
            files.remove(written)
        files.append(File.generated(config, path, content=text))
        if source:
            sources[source] = path
    if unknown := [page for page in config.extra["aliases"] if files.get_file_from_path(page) is None]:
        raise PluginError(f"{ALIASES.name} has words for pages that are not there: {', '.join(unknown)}")
    repository = f"{config.repo_url.rstrip('/')}/blob/main" if config.repo_url else ""
    config.extra["links"] = SiteLinks(sources, repository)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    words: list[str] = config.extra["aliases"].get(page.file.src_uri, [])
    if words:
        page.meta["tags"] = words
    links: SiteLinks = config.extra["links"]
    if page.file.src_uri == "configuration/index.md":
        markdown = re.sub(r"(?m)^\| `(\w+)` \|", r"| [\1](\1.md) |", markdown)
    return titled(links.rewritten(markdown, page.file.src_uri))


def titled(markdown: str) -> str:
    """The page with the names of files, and the reasons why the tests do not run a block, as titles of the blocks."""

    def title(found: re.Match[str]) -> str:
        return f'{found[1]}{found["fence"]} title="{found["file"] or "The tests do not run this: " + found["reason"]}"'

    return MARK.sub(title, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "api.md":  # its docstrings name pages by their files
        html = re.sub(r"(?<![\w/])docs/([a-z_]+)\.md", r'<a href="../\1/">\1</a>', html)
    try:
        return _fitted(rendered(html))
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def on_page_context(context: dict[str, Any], page: Page, config: MkDocsConfig, nav: Any) -> dict[str, Any]:
    source = config.extra["links"].sources.get(page.file.src_uri)
    if page.file.generated_by:
        page.edit_url = f"{config.extra['links'].repository}/{source}" if source and config.repo_url else None
    return context


def _fitted(html: str) -> str:
    """Names of files in cells may be broken at their hyphens and underscores, and drawings can be moved on a narrow
    screen, where their letters would be too small."""
    html = re.sub(r'<p>(<img [^>]*src="[^"]*\.svg"[^>]*>)</p>', r'<div class="wide">\1</div>', html)
    return re.sub(r"(<td[^>]*><a [^>]*>)([\w-]{24,})(</a>)", _breakable, html)


def _breakable(found: re.Match[str]) -> str:
    return found[1] + re.sub(r"([-_])", r"\1<wbr>", found[2]) + found[3]
