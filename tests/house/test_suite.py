"""The suite's own rules: what a test leaves behind, a test that hangs, files that cost more than a bound, and tiers are
told by name. Each rule is seen to fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import cover
import due
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


COSTLY = """
import time

def test_costly():
    end = time.process_time() + 1.5  # more than the start of a worker, which counts for its first test
    while time.process_time() < end:
        pass
"""


BOUNDS = [(["-n0"], 0), (["-n2", "--bound=1000"], 0), (["-n2", "--bound=0.1"], 1)]


@pytest.mark.deep
@pytest.mark.parametrize(("options", "status"), cover.essential(BOUNDS, BOUNDS[-1]))
def test_seconds_decide_the_exit_status_only_for_who_gives_a_bound(tmp_path, options, status):
    (tmp_path / "test_costly.py").write_text(COSTLY)
    (tmp_path / "test_cheap.py").write_text("def test_cheap(): pass\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["costs"]\n')
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-c", os.devnull]
    done = subprocess.run(
        [*command, *options, "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    assert done.returncode == status, done.stdout
    assert "2 passed" in done.stdout and "CPU seconds in 2 files, most of them in:" in done.stdout
    dearest = [line.split()[1] for line in done.stdout.splitlines() if line.endswith(".py")]
    assert dearest == ["test_costly.py", "test_cheap.py"]
    assert ("That is more than 0 CPU seconds" in done.stdout) == bool(status)


KILLED = """
import os, signal, subprocess, sys, time
import costs, leaks
own = costs.Costs()
before = own.used()
orphan = int(subprocess.check_output(["sh", "-c", f"{sys.executable} -c 'while True: pass' >&2 & echo $!"]))
while int(leaks.stat(orphan)[11]) * costs.TICK_S < 0.5:
    time.sleep(0.02)
os.kill(orphan, signal.SIGKILL)
while os.path.exists(f"/proc/{orphan}") and leaks.stat(orphan)[0] not in "ZX":
    time.sleep(0.02)
used = own.used() - before
own.close()
print(used, own.group is not None, own.group and own.group.exists())
"""


@pytest.mark.deep
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


def test_each_turn_runs_what_has_not_run_for_the_longest_time_until_all_has_run():
    seconds = {f"tests/test_{i}.py": float(i % 7 + 1) for i in range(40)}
    results = {name: due.Result(1, seconds=seconds[name]) for name in seconds}
    ran: set[str] = set()
    for turn in range(2, 14):
        part = due.due(set(seconds), results, 10)
        assert part and sum(seconds[name] for name in part) <= sum(seconds.values()) / 10
        left = set(seconds) - ran
        assert part <= left or left < part, "none runs twice before all have run"
        ran |= part
        results |= {name: due.Result(turn, seconds=seconds[name]) for name in part}
    assert ran == set(seconds)


def test_new_files_are_due_first_failed_ones_too_and_slurms_run_alone():
    known = {f"tests/{name}.py": due.Result(turn, seconds=10.0) for turn, name in enumerate("abcdef", 1)}
    everything = {*known, "tests/new.py"}
    assert due.due(everything, known, 3) == {"tests/new.py", "tests/a.py"}
    failed = known | {f"tests/{name}.py": due.Result(9, failed=["x"], seconds=60.0) for name in "ef"}
    assert due.due(everything, failed, 9) == {"tests/e.py", "tests/new.py"}, "what always fails holds up no other file"
    slurm = {"tests/slurm/a.py", "tests/slurm/b.py"}
    assert due.due(everything | slurm, known | dict.fromkeys(slurm, due.Result(0)), 3) == {"tests/new.py", "tests/a.py"}
    later = {name: due.Result(8) for name in everything}
    assert due.due(everything | slurm, later, 3) == {"tests/slurm/a.py"}
    assert len(due.due({f"tests/{i}.py" for i in range(100)} | set(known), known, 10)) < 12, "new files may be dear"


SEEN = """
import pytest

pytestmark = pytest.mark.deep

def test_passes(): pass

def test_fails(): assert False

def test_is_skipped(): pytest.skip("for a reason")

@pytest.fixture
def ends_badly():
    yield
    assert False

def test_ends_badly(ends_badly): pass
"""


@pytest.mark.deep
def test_results_are_of_what_ran_and_of_files_that_are_there(tmp_path):
    known = {"tests/gone.py": {"number": 1}, "tests/cover.py": {"number": 1, "passed": 5}}
    (tmp_path / "deep.json").write_text(json.dumps(known))
    (tmp_path / "tests").mkdir()
    seen = tmp_path / "tests" / "shares.py"  # a name that is there
    seen.write_text(SEEN)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["costs", "due"]\n')
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-c", os.devnull]
    command += ["--results=deep.json", "--rootdir", tmp_path, "-m", "deep"]

    def run(*more: str | Path) -> int:
        environment = os.environ | {"PYTHONPATH": str(TESTS)}
        return subprocess.run([*command, *more], capture_output=True, cwd=tmp_path, env=environment).returncode

    assert run(seen, "-n2") == 1
    results = due.read(tmp_path / "deep.json")
    assert set(results) == {"tests/cover.py", "tests/shares.py"} and results["tests/cover.py"].passed == 5
    result = results["tests/shares.py"]
    assert (result.passed, result.skipped) == (1, 1)
    assert result.failed == ["tests/shares.py::test_ends_badly", "tests/shares.py::test_fails"]
    before = (tmp_path / "deep.json").read_text()
    for part in ([f"{seen}::test_passes"], [seen, "-k", "passes"], [seen, "-x"], [seen, "-m", "not deep"]):
        assert run(*part) == 4, "these are not whole files"
    assert (tmp_path / "deep.json").read_text() == before


def test_no_file_of_the_deep_tier_has_failed():
    failed = [test for result in due.read(due.RESULTS).values() for test in result.failed]
    assert failed == [], "mend them, and run make test-due again"


@pytest.mark.skipif(not (TESTS.parent / ".git").exists(), reason="there is no history")
def test_every_file_of_the_deep_tier_has_run_in_the_last_changes():
    files = {
        path
        for part in ("nodes", "e2e", "ranks", "unit", "house", "slurm")
        for path in (TESTS / part).rglob("test_*.py")
    }
    deep = {
        path.relative_to(TESTS.parent).as_posix()
        for path in files
        if re.search(r"^@?.*\bmark\.deep\b", path.read_text(), re.M)
    }
    assert due.late(deep, due.read(due.RESULTS), due.num_commits()) == [], "run make test-due"


def test_a_file_is_late_after_so_many_commits():
    known = {"a": due.Result(100), "b": due.Result(101)}
    assert due.late({"a", "b"}, known, 101 + due.MAX_COMMITS) == ["a"]
    assert due.late({"a", "b", "new"}, known, 100 + due.MAX_COMMITS + 1) == ["a", "new"]


def test_cases_that_are_not_essential_are_deep():
    cases = cover.essential(["tp2", ("pp2", 3)], "tp2")
    assert cases[0] == "tp2" and cases[1].values == ("pp2", 3)
    assert [mark.name for mark in cases[1].marks] == ["deep"]
    with pytest.raises(AssertionError, match="cp2 is not one of the cases"):
        cover.essential(["tp2"], "cp2")
