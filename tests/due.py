"""The deep tier in turns, and what each of its files did when it last ran: tests/deep.json. (pytest plugin)

    make test-due                                         # the files that are due
    make test-deep ARGS="--results=tests/deep.json"       # the tier whole, apart from Slurm's

Both write the file. Due are files that failed, and the ones that have never run or not for the longest time. CI
refuses a history in which a file last ran more than MAX_COMMITS commits ago, which are about three changes that land.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path

import costs
import pytest

RESULTS = Path(__file__).with_name("deep.json")
ALONE = "tests/slurm/"
"""Slurm's daemons wait for nodes that do not answer in time, so none of these files runs beside another one."""
MAX_COMMITS = 300


@dataclass(frozen=True)
class Result:
    """What a file did when it last ran.

    >>> Result(number=1132, date="2026-11-28", commit="43978cc", passed=12, skipped=0, seconds=44.0)
    """

    number: int = 0
    """The number of commits in the history of the one that was checked out; 0 before the first run."""
    date: str = ""
    commit: str = ""
    """What was checked out; changes that were not committed may have been there."""
    passed: int = 0
    skipped: int = 0
    failed: Sequence[str] = ()
    """The names of tests that failed."""
    seconds: float = 1.0
    """CPU seconds (tests/costs.py)."""


Outcomes = dict[str, str]
"""What each test of a file did: passed, skipped or failed."""


def due(names: set[str], results: Mapping[str, Result], num_turns: int) -> set[str]:
    """The files that are due, about one of `num_turns` parts of all seconds: files that failed for half of it at most,
    and then those that have not run for the longest time, new files first. At least one is of the latter kind."""
    seconds = {name: results[name].seconds for name in names if name in results}
    guess = sum(seconds.values()) / len(seconds) if seconds else 1.0
    order = sorted(names, key=lambda name: (results.get(name, Result()).number, name))
    if order and order[0].startswith(ALONE):
        return {order[0]}
    order = [name for name in order if not name.startswith(ALONE)]

    def first(names: Sequence[str], room: float) -> list[str]:
        """As many of the first files as there is room for, and one at least."""
        sums = list(accumulate(seconds.get(name, guess) for name in names))
        return list(names[: max(1, sum(one <= room for one in sums))])

    room = sum(seconds.get(name, guess) for name in order) / num_turns
    again = first([name for name in order if name in results and results[name].failed], room / 2)
    room -= sum(seconds[name] for name in again)
    return {*again, *first([name for name in order if name not in again], room)}


def read(path: Path) -> dict[str, Result]:
    if not path.exists():
        return {}
    return {name: Result(**fields) for name, fields in json.loads(path.read_text()).items()}


def write(path: Path, outcomes: Mapping[str, Outcomes], seconds: Mapping[str, float], commit: str, number: int) -> None:
    """Replace the results of the files that ran. The others stay, unless their file is gone."""
    known, today = read(path), date.today().isoformat()
    for name, seen in outcomes.items():
        count = Counter(seen.values())
        failed = sorted(test for test, outcome in seen.items() if outcome == "failed")
        took = round(seconds.get(name, known.get(name, Result()).seconds), 1)
        known[name] = Result(number, today, commit, count["passed"], count["skipped"], failed, took)
    root = Path(__file__).parents[1]
    kept = {name: asdict(known[name]) for name in sorted(known) if (root / name).exists()}
    lines = (f" {json.dumps(name)}: {json.dumps(fields)}" for name, fields in kept.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


_outcomes = pytest.StashKey[dict[str, Outcomes]]()


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, metavar="FILE", help="write into it what each file did")
    parser.addoption("--due", type=int, metavar="N", help="run the files that are due, a part of N of all")


def pytest_configure(config):
    if path := config.getoption("--results"):
        option = config.getoption
        some = option("keyword") or option("deselect") or option("maxfail") or any("::" in one for one in config.args)
        if some or option("markexpr") != "deep":
            raise pytest.UsageError("--results is of whole files: give -m deep, and neither -k, -x, --deselect nor ::")
        try:
            read(path)
        except (TypeError, ValueError) as error:
            raise pytest.UsageError(f"{path} cannot be read ({error}): git checkout {path}") from None
    config.stash[_outcomes] = outcomes = {}
    if not hasattr(config, "workerinput"):  # a worker's reports reach the process that started it
        config.pluginmanager.register(Recorder(outcomes))


class Recorder:
    def __init__(self, outcomes: dict[str, Outcomes]) -> None:
        self._outcomes = outcomes

    def pytest_runtest_logreport(self, report):
        seen = self._outcomes.setdefault(file_of(report.nodeid), {})
        if report.failed or seen.get(report.nodeid, "passed") == "passed":  # a teardown may fail, too
            seen[report.nodeid] = report.outcome

    def pytest_collectreport(self, report):
        if report.failed:
            self._outcomes.setdefault(file_of(report.nodeid), {})[report.nodeid] = "failed"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--due"):
        return
    chosen = due({file_of(item.nodeid) for item in items}, read(RESULTS), config.getoption("--due"))
    config.hook.pytest_deselected(items=[item for item in items if file_of(item.nodeid) not in chosen])
    items[:] = [item for item in items if file_of(item.nodeid) in chosen]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    path, outcomes = session.config.getoption("--results"), session.config.stash[_outcomes]
    if not path or hasattr(session.config, "workerinput") or exitstatus not in (0, 1):
        return  # a run that was interrupted has not seen its files whole
    commit = git("rev-parse", "--short", "HEAD") if shutil.which("git") else ""
    write(path, outcomes, costs.of_files(session.config), commit, num_commits() if commit else 1)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=RESULTS.parent, capture_output=True, text=True).stdout.strip()


def num_commits() -> int:
    return int(git("rev-list", "--count", "HEAD"))


def late(names: set[str], results: Mapping[str, Result], number: int) -> list[str]:
    """The files that last ran more than MAX_COMMITS commits ago, or never."""
    return sorted(name for name in names if number - results.get(name, Result()).number > MAX_COMMITS)
