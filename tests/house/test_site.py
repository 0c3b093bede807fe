"""The documentation as a site: it builds, every page is there, the search finds the words of other libraries, and the
first pages have the numbers that commands have written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import yaml
from markdown.extensions.toc import slugify
from pages import ROOT, blocks

from megatron_rl.__main__ import COMMANDS
from megatron_rl.config.reference import parts
from megatron_rl.tools.docs import configuration, numbers, recipes, tutorials
from megatron_rl.tools.docs.formulas import rendered
from megatron_rl.tools.docs.links import LINK, SiteLinks

SEARCHES = {
    "Qwen3-32B": "recipes/qwen3_32b/",
    "learning rate": "configuration/policy/",
    "batch size": "configuration/rollout/",
    "install": "install/",
    "multi-node": "slurm/",
    "H100": "status/",
    "DPO": "sft_and_ppo/",
    "distillation": "algorithms/",
    "tool calling": "environments/",
    "throughput": "profiling/",
    "FP8": "models/",
    "staleness": "asynchronous/",
    "weight sync": "weight_sync/",
    "macOS": "install/",
    "train_batch_size": "verl_keys/",
    "ppo_mini_batch_size": "coming_from_verl/",
    "custom reward": "rewards/",
    "custom model": "add_a_model/",
    "GRPO": "algorithms/",
    "PPO": "sft_and_ppo/",
    "SFT": "sft_and_ppo/",
    "LoRA": "lora/",
    "KL": "algorithms/",
    "max length": "configuration/rollout/",
    "out of memory": "sizing/",
    "python version": "install/",
    "reasoning": "reasoning/",
    "dynamic sampling": "asynchronous/",
    "checkpoint resume": "checkpoints/",
}
"""What people look for, and the page that they must find first."""
NOT_RUN = "The tests do not run this:"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built strictly: a link to nowhere, a page that the navigation lacks, and a docstring that cannot be read are
    errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_has_its_pages(site):
    assert "grpo" in (site / "api/index.html").read_text()
    commands = (site / "commands/index.html").read_text()
    assert all(f"usage: megatron-rl {name}" in commands for name in COMMANDS)
    for folder in recipes.folders():
        page = (site / "recipes" / folder.name / "index.html").read_text()
        assert all(path.name in page for path in folder.glob("*.yaml"))
    for source in tutorials.sources():
        assert (site / "tutorials" / source.stem / "index.html").exists()


def test_a_reader_sees_the_name_of_a_file_and_what_is_not_tested(site):
    for page in (ROOT / "docs").glob("*.md"):
        built = site / ("" if page.stem == "index" else page.stem) / "index.html"
        titles = re.findall(r'<span class="filename">(.*?)</span>', built.read_text())
        marks = [block.mark.replace("not run:", NOT_RUN) for block in blocks(page)]
        told = [mark.removeprefix("file: ") for mark in marks if mark.startswith(("file: ", NOT_RUN))]
        assert [unescape(title) for title in titles] == told, page


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?|png|svg))"', page.read_text())
        assert loaded == [], page


def test_the_search_finds_the_words_that_people_know(site):
    """With the site's own search, which is a program for browsers."""
    node = shutil.which("node") or pytest.skip("node is not installed, which runs the site's search")
    words = [node, str(Path(__file__).with_name("search.js")), str(site), *SEARCHES]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert dict(zip(SEARCHES, printed.splitlines(), strict=True)) == SEARCHES


def test_every_key_is_on_a_page_of_the_configuration():
    pages = configuration.pages()
    navigation = (ROOT / "mkdocs.yml").read_text()
    index = (ROOT / "docs/configuration/index.md").read_text()
    for name in pages:
        assert f"configuration/{name}" in navigation and f"`{name.removesuffix('.md')}`" in index
    for part in parts():
        page = pages[f"{re.split(r'[.[]', part.path)[0]}.md"]
        for key in part.keys:
            assert f"`{key.path.rpartition('.')[2]}`" in page, key.path
            assert not key.is_advanced or f"**`{key.path.rpartition('.')[2]}`**" in pages["advanced.md"], key.path
    words = sum(len(re.sub(r"\{ #[^}]*\}|\]\([^)]*\)", "", text).split()) for text in pages.values())
    assert words <= 16_039, "print what is the same in several places once"


def test_each_number_of_the_first_pages_has_been_written_by_a_command_or_names_its_record():
    assert numbers.differences() == []
    known = json.loads(numbers.NUMBERS.read_text())
    for entry in known["measured"]:
        assert entry["pages"] and entry.get("date", "") and ("command" in entry or (ROOT / entry["record"]).exists())


def test_a_wrong_and_an_unknown_number_are_found(tmp_path, monkeypatch):
    known = {
        "measured": [
            {"name": "a", "says": "{low} to {high}", "results": [0.25, 0.5], "form": ".2f", "pages": ["P.md"]}
        ],
        "names": ["Python 3.11"],
    }
    (tmp_path / "numbers.json").write_text(numbers.written(known))
    monkeypatch.setattr(numbers, "NUMBERS", tmp_path / "numbers.json")
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    page = tmp_path / "P.md"
    page.write_text("Python 3.11 takes 0.25 to 0.50, and `x=7`:\n\n```\n12\n```\n")
    assert numbers.differences(["P.md"]) == []
    page.write_text("Python 3.11 takes 0.25 to 0.51 of 9 s")
    assert [line.split(" does ")[0] for line in numbers.differences(["P.md"])] == [
        "P.md",
        *(f"P.md has the number {number}, which is not in numbers.json" for number in ("0.25", "0.51", "9")),
    ]


def test_what_a_command_prints_is_stored(tmp_path, monkeypatch):
    known = {"measured": [{"name": "speed", "path": "modes/a : modes/b", "results": []}], "names": []}
    (tmp_path / "numbers.json").write_text(numbers.written(known))
    monkeypatch.setattr(numbers, "NUMBERS", tmp_path / "numbers.json")
    for name, other in (("one", 2), ("two", 4)):
        (tmp_path / name).write_text(f'a line\n{{"modes": {{"a": [4, 6], "b": [{other}, 2]}}}}\n')
    numbers.main(["store", "speed", str(tmp_path / "one"), str(tmp_path / "two")])
    [entry] = json.loads((tmp_path / "numbers.json").read_text())["measured"]
    assert entry["results"] == [2, 3, 1, 3] and entry["commit"] and entry["date"]


def test_formulas_are_mathml():
    page = r'<p><span class="arithmatex">\(\mathrm{clip}(r) &lt; 1\)</span></p><div class="arithmatex">\[a_t\]</div>'
    html = rendered(page)
    assert (
        html.count("<math") == 2 and "arithmatex" not in html and "<mtext>clip</mtext>" in html and "&#x0003C;" in html
    )
    with pytest.raises(ValueError, match="cannot be read"):
        rendered(r'<span class="arithmatex">\(\nosuchcommand x\)</span>')


def test_links_lead_to_pages_or_to_the_repository():
    pages = {"recipes/tiny/RECORD.md": "recipes/tiny.md", "recipes/README.md": "recipes/index.md"}
    text = "[a](../README.md) [b](../../docs/lora.md#x) [`c`](../../configs/run/x.yaml) [d](https://e) `[f](g)`"
    here, there = SiteLinks(pages), SiteLinks(pages, "https://host/blob/main")
    assert here.rewritten(text, "recipes/tiny.md").startswith("[a](index.md) [b](../lora.md#x) `c` [d](https://e)")
    assert "[`c`](https://host/blob/main/configs/run/x.yaml)" in there.rewritten(text, "recipes/tiny.md")
    assert there.rewritten("[t](../recipes/tiny/RECORD.md)", "index.md") == "[t](recipes/tiny.md)"
    assert here.rewritten("```\n[a](../x.md)\n```\n", "recipes/tiny.md") == "```\n[a](../x.md)\n```\n"


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {slugify(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading), "-") for heading in headings}


def test_what_the_repository_links_is_there():
    """The build of the site checks its own links, and these are read in a clone, too."""
    texts = [*ROOT.glob("*.md"), *(ROOT / "recipes").rglob("*.md"), *(ROOT / "docs").rglob("*.md")]
    missing = []
    for page in texts:
        for found in LINK.finditer(page.read_text()):
            link, _, anchor = found["target"].partition("#")
            target = page.parent / link if link else page
            if ":" in found["target"] or target == ROOT / "docs/configuration/index.md":
                continue  # the anchors of its page are sections, which have pages on the site
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in slugs(target)):
                missing.append(f"{page.relative_to(ROOT)}: {found['target']}")
    assert missing == []


def test_the_navigation_has_every_recipe_and_tutorial():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in [f"recipes/{folder.name}.md" for folder in recipes.folders()]:
        assert page in navigation
    for source in tutorials.sources():
        assert f"tutorials/{source.stem}.md" in navigation and tutorials.output_of(source).exists()
    aliases = yaml.safe_load((ROOT / "tools/docs/aliases.yaml").read_text())
    assert all(page in navigation for page in aliases)
