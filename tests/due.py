"""The deep tier in turns, and what each of its files did when it last ran: tests/deep.json. (pytest plugin)

    make test-due                                         # the files that are due: a tenth of the tier, or Slurm's
    make test-deep ARGS="--results=tests/deep.json"       # the tier whole, apart from Slurm's

Both write the file. Due are the files that failed, then files that have never run, then those that have not run for the
longest time. So `make test-due` runs the whole tier in about eleven times, if each time's results are committed.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import costs
import pytest

RESULTS = Path(__file__).with_name("deep.json")
ALONE = "tests/slurm/"
"""Slurm's daemons wait for nodes that do not answer in time, so none of these files runs beside another one."""


@dataclass(frozen=True)
class Result:
    """What a file did when it last ran.

    >>> Result(turn=3, date="2026-11-28", commit="47cde0d", passed=12, skipped=0, seconds=44.0)
    """

    turn: int = 0
    """Counts the runs that wrote results; 0 before the first one."""
    date: str = ""
    commit: str = ""
    """What was checked out; changes that were not committed may have been there."""
    passed: int = 0
    skipped: int = 0
    failed: Sequence[str] = ()
    """The names of tests that failed."""
    seconds: float = 1.0
    """CPU seconds (tests/costs.py); the default is a guess for a file that has not run."""

    @property
    def rank(self) -> int:
        """Files with lower numbers are due earlier."""
        return -1 if self.failed else self.turn


Outcomes = dict[str, str]
"""What each test of a file did: passed, skipped or failed."""


def due(names: set[str], results: Mapping[str, Result], num_turns: int) -> set[str]:
    """The files that are due: together one of `num_turns` parts of all seconds at most, but at least one file."""
    known = {name: results.get(name, Result()) for name in sorted(names)}
    order = sorted(known, key=lambda name: known[name].rank)
    if order and order[0].startswith(ALONE):
        return {order[0]}
    order = [name for name in order if not name.startswith(ALONE)]
    room = sum(known[name].seconds for name in order) / num_turns
    chosen: set[str] = set()
    for name in order:
        room -= known[name].seconds
        if chosen and room < 0:
            break
        chosen.add(name)
    return chosen


def read(path: Path) -> dict[str, Result]:
    if not path.exists():
        return {}
    return {name: Result(**fields) for name, fields in json.loads(path.read_text()).items()}


def write(path: Path, outcomes: Mapping[str, Outcomes], seconds: Mapping[str, float], commit: str, today: str) -> None:
    """Replace the results of the files that ran. The others stay, unless their file is gone."""
    known = read(path)
    turn = 1 + max((result.turn for result in known.values()), default=0)
    for name, seen in outcomes.items():
        count = Counter(seen.values())
        failed = sorted(test for test, outcome in seen.items() if outcome == "failed")
        took = round(seconds.get(name, known.get(name, Result()).seconds), 1)
        known[name] = Result(turn, today, commit, count["passed"], count["skipped"], failed, took)
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
    if config.getoption("--results") and (
        config.getoption("keyword") or any("::" in argument for argument in config.args)
    ):
        raise pytest.UsageError("--results is of whole files, and -k or :: has chosen some of their tests")
    config.stash[_outcomes] = outcomes = {}
    if not hasattr(config, "workerinput"):  # a worker's reports reach the process that started it
        config.pluginmanager.register(Recorder(outcomes))


class Recorder:
    def __init__(self, outcomes: dict[str, Outcomes]) -> None:
        self._outcomes = outcomes

    def pytest_runtest_logreport(self, report):
        seen = self._outcomes.setdefault(file_of(report.nodeid), {})
        if seen.get(report.nodeid, "passed") == "passed":  # its teardown may fail, too
            seen[report.nodeid] = report.outcome


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
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, cwd=RESULTS.parent, capture_output=True, text=True).stdout.strip()
    write(path, outcomes, costs.of_files(session.config), commit, date.today().isoformat())
