"""The tests that a change touches are found by the imports."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron_rl.tools.bench import touched


def reached(path: str) -> dict[str, list[str]]:
    return {str(test): [str(p) for p in chain] for test, chain in touched.tests_of([Path(path)]).items()}


@pytest.mark.deep
def test_the_nearest_tests_come_first_with_their_chains_of_imports():
    found = reached("megatron_rl/balance/karmarkar_karp.py")
    first, *_ = found
    assert first == "tests/unit/balance/test_balance_karmarkar_karp.py"
    assert found[first] == [first, "megatron_rl/balance/karmarkar_karp.py"]
    lengths = [len(chain) for chain in found.values()]
    assert lengths == sorted(lengths)


def test_commands_scenarios_and_fixtures_count_as_imports():
    """A test starts a command by its name, names a scenario as a text, and gets a fixture from a conftest."""
    assert "tests/e2e/test_resume.py" in reached("megatron_rl/commands/grpo.py")
    assert (
        reached("tests/ranks/memory_scenarios.py")["tests/ranks/test_actor_phases.py"][1]
        == "tests/ranks/memory_scenarios.py"
    )
    assert "tests/ranks/test_actor_norms.py" in reached("tests/ranks/trainers.py")


def test_what_nothing_imports_touches_nothing_and_a_test_touches_itself():
    assert reached("megatron_rl/verifiers/text.py").keys().isdisjoint({"tests/unit/balance/test_balance_packing.py"})
    own, this = "tests/unit/balance/test_balance_packing.py", "tests/unit/tools/test_tools_touched.py"
    assert reached(own) == {own: [own], this: [this, own]}, "this file names it"


def test_a_configuration_touches_who_names_it_and_a_module_that_is_gone_who_imports_it():
    assert "tests/e2e/test_resume.py" in reached("configs/run/tiny_grpo.yaml")
    assert "tests/slurm/test_slurm_kinds.py" in reached("slurm/train.sbatch")
    names = touched.module_names([Path("megatron_rl/balance/gone.py")])
    assert names["megatron_rl.balance.gone"] == Path("megatron_rl/balance/gone.py")
    changed = [Path("a/gone.py"), Path("a/gone.txt"), Path("tools/bench/touched.py")]
    assert touched.gone_of(changed) == (Path("a/gone.py"),)


def test_imports_for_types_alone_do_not_count(tmp_path, monkeypatch):
    (tmp_path / "megatron_rl").mkdir()
    for name, text in {
        "__init__": "",
        "a": "",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron_rl.a import x\n",
        "c": "def late():\n    from megatron_rl import a\n",
    }.items():
        (tmp_path / "megatron_rl" / f"{name}.py").write_text(text)
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    names = touched.module_names()
    a, b, c = (Path(f"megatron_rl/{name}.py") for name in "abc")
    assert a not in touched.imports_of(b, names) and a in touched.imports_of(c, names)


def test_the_command_lists_a_change_and_names_a_wrong_base(tmp_path, monkeypatch, capsys):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="--base"):
        touched.main(["--list"])
    with pytest.raises(SystemExit, match="'nothing'"):
        touched.main(["--list", "--base", "nothing"])
