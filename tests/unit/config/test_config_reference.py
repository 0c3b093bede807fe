"""The reference of all keys: it is complete, and the command prints all of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.commands import config as tool
from megatron_rl.config.reference import ADVANCED, Heading, Key, find, parts, plain
from megatron_rl.config.schema import PpoRunConfig
from megatron_rl.config.section import Section

ROOT = Path(__file__).parents[3]


def test_the_command_prints_every_section_and_key(capsys):
    assert tool.main(["--markdown"]) == 0
    printed = capsys.readouterr().out
    for part in parts():
        assert f"\n## {part.path}\n" in printed
        assert all(f"- **`{key.path.rpartition('.')[2]}`**" in printed for key in part.keys)


def test_every_key_has_a_meaning_and_a_place():
    every = parts()
    assert all(key.meaning or key.type == "section" for part in every for key in part.keys)
    paths = [part.path for part in every]
    assert len(set(paths)) == len(paths)
    headings = {plain(path) for path in paths}
    assert all(
        key.path in headings for part in every for key in part.keys if key.type == "section" and "[" not in key.path
    )


def keys_of(value: Any, path: str = "") -> Iterator[str]:
    """The dotted keys of a file; the items of a list have its key."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        own = f"{path}.{name}" if path else name
        yield own
        yield from keys_of(inner, own)
    for inner in value if isinstance(value, list) else ():
        yield from keys_of(inner, path)


def test_advanced_keys_exist_and_no_recipe_sets_one():
    known = {plain(key.path) for part in parts() for key in part.keys}
    assert known >= ADVANCED
    files = [path for folder in ("recipes", "configs") for path in (ROOT / folder).rglob("*.yaml")]
    assert len(files) > 40
    assert ADVANCED.isdisjoint(key for path in files for key in keys_of(yaml.safe_load(path.read_text())))


def test_every_default_of_a_run_is_told():
    """The values of a run with nothing but the required keys."""
    run = PpoRunConfig(run={"name": "x", "steps": 1}, model={"path": "m"}, data={"train": "rows"})
    told = {key.path: key.default for part in parts() for key in part.keys}
    for section in type(run).model_fields:
        for name, value in getattr(run, section) or () if isinstance(getattr(run, section), Section) else ():
            default = told.get(f"{section}.{name}")
            if default is not None and isinstance(value, bool | int | str):
                assert default.strip('"') == str(value).lower() if isinstance(value, bool) else str(value)


def test_one_key_and_one_section_are_found():
    [part] = find("rollout.max_lag")
    assert part == Heading("rollout", "", (part.keys[0],))
    assert part.keys[0].path == "rollout.max_lag" and part.keys[0].type == "integer >= 0"
    [clip] = find("algorithm.loss[dual_clip].clip_ratio_low")
    assert clip.keys[0].type.startswith("number")
    assert [part.path for part in find("algorithm.kl")][:2] == ["algorithm.kl", "algorithm.kl.coefficient[fixed]"]
    assert [part.path for part in find("rewards.url")] == ["rewards[judge]", "rewards[reward_model]"]
    same = {part.path: part.meaning for part in find("critic")}
    for kind in ("adam", "muon"):
        assert same[f"critic.optimizer[{kind}]"].startswith(f"The same keys as `policy.optimizer[{kind}]`")
    seed = Key("run.seed", "integer >= 0 and < 2147483648", "0", find("run.seed")[0].keys[0].meaning)
    assert find("run.seed") == [Heading("run", "", (seed,))]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("critic.optimizer.lr", ["policy.optimizer[adam]", "policy.optimizer[muon]"]),
        ("critic.parallel.tensor", ["policy.parallel"]),
        ("policy.optimizer.kind", ["policy.optimizer[adam]", "policy.optimizer[muon]"]),
        ("rollout.speculative.kind", ["rollout.speculative"]),  # both kinds have the same keys
    ],
)
def test_kinds_and_keys_of_sections_that_are_described_elsewhere_are_found(path, found):
    assert [part.path for part in find(path)] == found


def test_an_unknown_key_gets_the_nearest_ones(capsys):
    with pytest.raises(ValueError, match="rollout.num_engines"):
        find("rollout.num_engine")
    assert tool.main(["nothing.like.it"]) == 2
    assert "error: there is no key and no section 'nothing.like.it'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("lr", "the learning rate is policy.optimizer.lr"),
        ("batch_size", "prompts of a step are rollout.prompts_per_step"),
        ("tensor_parallel_size", "it is policy.parallel.tensor"),
        ("rollout.tensor", "it is rollout.parallel.tensor"),
        ("sft.epochs", "it is run.epochs now"),
        ("rollout.speculative.method", "it is rollout.speculative.kind"),
        ("policy.mtp", "the multi-token head is policy.multi_token"),
    ],
)
def test_a_name_of_another_library_or_version_has_the_same_hint_as_in_a_file(key, says):
    with pytest.raises(ValueError, match=says):
        find(key)


def test_the_sections_are_listed(capsys):
    assert tool.main([]) == 0
    listed = capsys.readouterr().out
    assert "- `rollout`" in listed and "- `rewards`" in listed and "- `policy.optimizer[adam]`" not in listed


SECTIONS = "algorithm balance bridge checkpoint cluster critic data eval observe policy rewards rollout sft slurm"
NAMED = re.compile(rf"(?<![\w/.-])(?:{SECTIONS.replace(' ', '|')})(?:\.[a-z_]+)+")
FILES = (".json", ".jsonl", ".log", ".py", ".yaml")
FREE = ("policy.megatron.", "rollout.vllm.", "rollout.environment.arguments.")
"""Mappings whose keys are another project's, or the user's."""
OTHERS = {"data.train_files", "balance.fit_cost", "policy.parallel.alignment"}
OTHERS |= {"rollout.program", "rollout.start.slot_rank", "slurm.launch"}
"""A key of verl; functions, a property and modules that docstrings name by their room."""


def named_keys(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from NAMED.findall(node.value)


def exists(key: str) -> bool:
    try:
        return bool(find(key))
    except ValueError:
        return key.startswith(FREE)


def test_the_keys_that_pages_name_exist():
    code = re.compile(r"```.*?```|`[^`]+`", re.S)
    found = {
        (key, page.name)
        for page in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("recipes/*/RECORD.md"), ROOT / "README.md"]
        if page.name not in ("coming_from_verl.md", "coming_from_trl.md")
        for part in code.findall(page.read_text())
        for key in NAMED.findall(part)
    }
    assert len(found) > 150
    missing = [(key, name) for key, name in sorted(found) if not key.endswith(FILES) and not exists(key)]
    assert [one for one in missing if one[0] not in OTHERS] == []


def test_the_keys_that_messages_and_docstrings_name_exist():
    sources = [path for room in ("megatron_rl", "recipes", "tools") for path in (ROOT / room).rglob("*.py")]
    found = {(key, path.name) for path in sources if path.parent.name != "verl" for key in named_keys(path)}
    assert len(found) > 300 and not exists("algorithm.loss.clip_high")
    missing = [(key, name) for key, name in sorted(found) if not key.endswith(FILES) and not exists(key)]
    assert [one for one in missing if one[0] not in OTHERS] == []
