"""Mutants change one expression each, and a tier that notices is told."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_rl.tools.bench import mutants
from megatron_rl.tools.bench.mutants import Mutant, mutants_of

SOURCE = '''"""A text with 1 + 1."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 3


def clip(x: int = 5, *, low=0.5):
    """At most 5."""
    if x < 3 and not low:
        return x * 2 + 1
    assert x > 0
    raise ValueError("at most" + str(7))
'''


def test_each_operator_comparison_and_constant_is_a_mutant_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    found = {(m.line, m.before, m.after) for m in mutants_of(Path("one.py"))}
    assert found == {
        (8, "5", "6"),
        (8, "0.5", "1.25"),
        (10, "x < 3 and not low", "(x < 3 or not low)"),
        (10, "x < 3", "(x <= 3)"),
        (10, "3", "4"),
        (10, "not low", "(low)"),
        (11, "x * 2 + 1", "(x * 2 - 1)"),
        (11, "x * 2", "(x + 2)"),
        (11, "2", "3"),
        (11, "1", "2"),
    }
    for mutant in mutants_of(Path("one.py")):
        source = SOURCE.encode()
        changed = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant


def test_the_draw_depends_on_the_seed_and_the_room_alone():
    assert mutants.draw("balance", 5, 0) == mutants.draw("balance", 5, 0) != mutants.draw("balance", 5, 1)
    assert {mutant.room for mutant in mutants.draw("layout", 5, 0)} == {"layout"}


@pytest.mark.deep
def test_a_mutant_that_matters_is_killed_and_one_without_a_meaning_lives(tmp_path):
    # Written as a path, it would make this test one of the file's own.
    file = str(Path("megatron_rl", "balance", "karmarkar_karp.py"))
    source = (mutants.ROOT / file).read_bytes()
    tree = mutants.copy_tree(tmp_path)
    matters = next(m for m in mutants_of(Path(file)) if m.before == "len(heap) > 1")
    killed = mutants.try_out(matters, tree, reach=1, limit_s=600)
    assert killed.killed_by == "test" and "FAILED" in killed.test
    none = Mutant(file, 0, 0, 1, "", "")
    assert mutants.try_out(none, tree, reach=1, limit_s=600).killed_by == ""
    assert (tree / file).read_bytes() == source
