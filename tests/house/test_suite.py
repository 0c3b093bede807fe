"""The suite's own rules: what a test leaves behind, a test that hangs, a file above its budget, and tiers are told by
name. Each rule is seen to fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import budget
import cover
import leaks
import pytest
from patience import deadline

TESTS = Path(__file__).parents[1]

BAD = """
import os, signal, socket, subprocess, sys, time
import leaks
import pytest

kept = []

def test_clean():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_leaves_a_process():
    kept.append(subprocess.Popen(["sleep", "200"]))

def test_leaves_an_orphan():
    subprocess.run(["sh", "-c", "sleep 200 & exit"], check=True, start_new_session=True)

def test_leaves_a_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_leaves_a_variable():
    os.environ["LEFT_BEHIND"] = "1"

def test_deletes_a_variable():
    del os.environ["HOME"]

def test_leaves_a_folder(tmp_path):
    os.chdir(tmp_path)

def test_deletes_its_folder(tmp_path):
    os.chdir(tmp_path)
    tmp_path.rmdir()

def test_sees_nothing_of_them():
    assert "LEFT_BEHIND" not in os.environ and os.environ["HOME"] and os.getcwd()
    assert kept[0].wait() != 0, "the process that was left was ended"

def test_leaves_shared_memory():
    (leaks.SHARED_MEMORY / "left_behind").touch()

@pytest.fixture(scope="module")
def server():
    one = subprocess.Popen(["sleep", "200"])
    yield one
    one.kill()
    one.wait()

def test_has_a_server(server):
    with leaks.lasting("module"):
        started = subprocess.Popen(["sleep", "200"])
    kept.append(started)

def test_ends_what_was_to_last():
    kept[-1].kill()
    kept[-1].wait()

@pytest.mark.deadline(0.2)
def test_hangs():
    time.sleep(60)

@pytest.mark.deadline(seconds=0.2)
def test_goes_on_after_its_deadline():
    try:
        time.sleep(60)
    except BaseException:
        pass

def test_last():
    pass
"""

KILLS = """
import os

def test_before():
    pass

def test_kills():
    os._exit(3)

def test_after():
    pass
"""


CONFTEST = """
import leaks

pytest_plugins = ["leaks", "deadlines"]
leaks.GRACE_S = 0.5

def pytest_configure(config):
    config.addinivalue_line("markers", "deadline(seconds)")
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What pytest says of these tests: {name: [outcomes and messages]}."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "test_bad.py").write_text(BAD)
    (folder / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "--tb=line", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", folder, folder],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    return done.stdout


OWN = pytest.mark.skipif(not leaks.shared_memory_is_own(), reason="shared memory of their own takes the right to mount")


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("test_leaves_a_process", "process"),
        ("test_leaves_a_port", "port"),
        ("test_leaves_a_variable", "variable LEFT_BEHIND=1"),
        ("test_deletes_a_variable", "variable HOME=deleted"),
        ("test_leaves_a_folder", "working folder"),
        ("test_deletes_its_folder", "working folder that was deleted"),
        pytest.param("test_leaves_shared_memory", "shared memory left_behind", marks=OWN),
        ("test_last", "sleep 200"),  # an orphan is found at the end of its module
    ],
)
def test_what_is_left_behind_fails_the_test_by_name(outcome, name, left):
    [line] = [line for line in outcome.splitlines() if f"::{name} leaves behind: " in line and left in line][:1]
    assert "leaves behind: " in line


def test_a_test_that_hangs_is_ended_and_named(outcome):
    assert "::test_hangs has not ended by its deadline of 0 s" in outcome


def test_a_test_that_swallows_its_deadline_fails(outcome):
    assert "test_goes_on_after_its_deadline has gone on after its deadline of 0 s" in outcome


def test_a_test_that_ends_its_process_is_named_and_the_others_run(tmp_path):
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text(KILLS if number == 0 else "def test_fine(): pass\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    [options] = re.findall("^pytest := .* -m pytest (.*)$", (TESTS.parent / "Makefile").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "-c", os.devnull]
    done = subprocess.run(
        [*command, *options.split(), "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        timeout=deadline(120),
    )
    assert done.returncode == 1 and "crashed while running 'test_0.py::test_kills'" in done.stdout, done.stdout
    assert "test_0.py::test_kills has ended the process in which it ran" in done.stdout
    for name in ("test_0.py::test_before", "test_0.py::test_after", "test_1.py::test_fine", "test_2.py::test_fine"):
        assert f"PASSED {name}" in done.stdout


def test_what_may_last_and_what_is_clean_passes(outcome):
    passed = {line.partition("::")[2] for line in outcome.splitlines() if line.startswith("PASSED")}
    failed = {line.partition("::")[2].partition(" ")[0] for line in outcome.splitlines() if line.startswith("ERROR")}
    assert {
        "test_clean",
        "test_sees_nothing_of_them",
        "test_has_a_server",
        "test_ends_what_was_to_last",
    } <= passed - failed, outcome


def test_a_file_above_its_budget_is_named():
    budgets = {"tests/dist/test_a.py": 20.0, "tests/unit/balance/test_b.py": 6.0}
    at_most = {
        "tests/dist/test_a.py": 40.0,
        "tests/unit/balance/test_b.py": 12.0,
        "tests/unit/balance/test_new.py": 10.0,
    }
    assert budget.over(at_most, budgets) == []
    for name in at_most:
        [line] = budget.over(at_most | {name: at_most[name] + 0.1}, budgets)
        assert name in line and "its budget" in line and "tests/cover.py" in line


KILLED = """
import os, signal, subprocess, sys, time
import budget, leaks
costs = budget.Costs()
before = costs.used()
orphan = int(subprocess.check_output(["sh", "-c", f"{sys.executable} -c 'while True: pass' >&2 & echo $!"]))
while int(leaks.stat(orphan)[11]) * budget.TICK_S < 0.5:
    time.sleep(0.02)
os.kill(orphan, signal.SIGKILL)
while os.path.exists(f"/proc/{orphan}") and leaks.stat(orphan)[0] not in "ZX":
    time.sleep(0.02)
used = costs.used() - before
costs.close()
print(used, costs.group is not None, costs.group and costs.group.exists())
"""


def test_what_was_killed_is_counted():
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    seconds, has_group, is_left = done.stdout.split()
    if has_group == "False":
        pytest.skip("a control group takes root and cgroup v1")
    assert float(seconds) > 0.5 and is_left == "False"


def test_shards_are_all_files_once_and_about_equal():
    budgets = {f"tests/test_{i}.py": float(i % 7 + 1) for i in range(40)}
    parts = [budget.shard(set(budgets), budgets, index, 4) for index in range(4)]
    assert sorted(name for part in parts for name in part) == sorted(budgets)
    seconds = [sum(budgets[name] for name in part) for part in parts]
    assert max(seconds) - min(seconds) <= 7


def test_a_budget_keeps_what_did_not_run_and_forgets_files_that_are_gone(tmp_path):
    target = tmp_path / "budget.json"
    target.write_text(
        json.dumps({"test": {"tests/gone.py": 1.0, "tests/cover.py": 2.0}, "deep": {"tests/leaks.py": 1.0}})
    )
    budget.write(target, "test", {"tests/budget.py": 3.04})
    assert json.loads(target.read_text()) == {
        "test": {"tests/budget.py": 3.0, "tests/cover.py": 2.0},
        "deep": {"tests/leaks.py": 1.0},
    }


def test_cases_that_are_not_essential_are_deep():
    cases = cover.essential(["tp2", ("pp2", 3)], "tp2")
    assert cases[0] == "tp2" and cases[1].values == ("pp2", 3)
    assert [mark.name for mark in cases[1].marks] == ["deep"]
    with pytest.raises(AssertionError, match="cp2 is not one of the cases"):
        cover.essential(["tp2"], "cp2")


def test_every_file_of_tests_has_a_budget():
    root = budget.BUDGET.parents[1]
    budgets = json.loads(budget.BUDGET.read_text())
    files = {
        str(path.relative_to(root))
        for room in ("nodes", "e2e", "dist", "unit", "house")
        for path in (root / "tests" / room).rglob("test_*.py")
    }
    missing = sorted(files - {*budgets["test"], *budgets["deep"]})
    assert not missing, f'make test ARGS="--write-costs=tests/budget.json" writes those of {missing}'


def test_every_budget_is_of_a_file_that_exists():
    budgets = json.loads(budget.BUDGET.read_text())
    assert [name for tier in budgets.values() for name in tier if not (TESTS.parent / name).exists()] == []
