"""The CPU seconds that the tests take, file by file, processes of the tests included. (pytest plugin)

The end of a run prints their sum and the ten dearest files. No seconds decide the exit status, unless somebody asks:

    make test ARGS="--bound 700"    # status 1 if all files together have taken more than 700 CPU seconds

Seconds are those of the reference core of tests/patience.py, so that a slow or a busy machine may have the same bound.
What is started once for many files (the server of tests/warm.py) belongs to none.
"""

from __future__ import annotations

import os
import resource
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

import leaks
import pytest
import warm

NUM_DEAREST = 10
PROBE_S = 0.0225
"""What a sample of `slowness` takes on the reference core."""
PACE_S = 5.0
"""The time between two samples of `slowness`."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")


class Costs:
    """What this process and its descendants have used, file by file. A control group of their own also counts what was
    killed, as Ray ends its processes; without the right to make one, only what ended and was waited for is counted."""

    def __init__(self) -> None:
        self.of_file: dict[str, float] = {}
        self.group = own_group()
        self._pace = Pace()
        self._before = self.used()

    def close(self) -> None:
        if self.group:
            with suppress(OSError):  # a process is left in it
                (ACCOUNTS / "cgroup.procs").write_text(str(os.getpid()))
                self.group.rmdir()

    def end_file(self, name: str) -> None:
        used = self.used()
        spent, self._before = used - self._before, used
        self.of_file[name] = self.of_file.get(name, 0.0) + (spent / self._pace.mean() if spent > 1.0 else spent)
        self._before = self.used()

    def used(self) -> float:
        if self.group:
            own_of_server = (int(leaks.stat(pid)[i]) * TICK_S for pid in [warm.server_pid()] if pid for i in (11, 12))
            return int((self.group / "cpuacct.usage").read_text()) * 1e-9 - sum(own_of_server)
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        total = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        for pid, fields in leaks.family().items():
            own, of_ended_children = fields[11:13], fields[13:15]
            counted = of_ended_children if pid == warm.server_pid() else [*own, *of_ended_children]
            total += sum(map(int, counted)) * TICK_S
        return total


class Pace:
    """How many times slower than the reference core this one is, by a short loop of Python every few seconds. Other
    processes slow it down, those of the tests too, and when a file ends they have often ended already."""

    def __init__(self) -> None:
        self._samples = [slowness()]
        threading.Thread(target=self._sample, daemon=True, name="pace").start()

    def mean(self) -> float:
        """The mean since the last call."""
        samples, self._samples = [*self._samples, slowness()], []
        return statistics.fmean(samples)

    def _sample(self) -> None:
        while True:
            time.sleep(PACE_S)
            self._samples.append(slowness())


def slowness() -> float:
    """How many times slower than the reference core this one is now."""
    start = time.thread_time()
    sum(i * i % 7 for i in range(500_000))
    return max(1.0, (time.thread_time() - start) / PROBE_S)


def own_group() -> Path | None:
    """A new control group that this process is in (cgroup v1, as root), or None."""
    group = ACCOUNTS / f"megatron_rl_tests_{os.getpid()}"
    for old in ACCOUNTS.glob("megatron_rl_tests_*"):
        with suppress(OSError):  # it is in use
            old.rmdir()
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return None
    return group


_costs = pytest.StashKey[Costs]()
_all = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser):
    parser.addoption("--bound", type=float, metavar="SECONDS", help="fail if the files take more CPU seconds in all")


def pytest_configure(config):
    config.stash[_all] = {}


def pytest_sessionstart(session):
    session.config.stash[_costs] = Costs()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    result = yield
    if nextitem is None or nextitem.path != item.path:
        item.config.stash[_costs].end_file(item.nodeid.partition("::")[0])
    return result


def pytest_sessionfinish(session):
    config = session.config
    costs = config.stash[_costs].of_file
    config.stash[_costs].close()
    if hasattr(config, "workeroutput"):
        config.workeroutput["costs"] = costs
        return
    add(config, costs)
    if is_above(config) and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    add(node.config, getattr(node, "workeroutput", {}).get("costs", {}))


def pytest_terminal_summary(terminalreporter, config):
    if costs := of_files(config):
        for line in summary(costs):
            terminalreporter.write_line(line)
    if is_above(config):
        terminalreporter.write_line(
            f"That is more than {config.getoption('--bound'):.0f} CPU seconds: make what is dear cheaper, or mark what"
            " is dear and redundant as deep (tests/cover.py)",
            red=True,
        )


def add(config, costs: dict[str, float]) -> None:
    total = config.stash[_all]
    for name, seconds in costs.items():
        total[name] = total.get(name, 0.0) + seconds


def of_files(config) -> dict[str, float]:
    """The CPU seconds of each file, when all workers have ended."""
    return config.stash[_all]


def is_above(config) -> bool:
    bound = config.getoption("--bound")
    return bound is not None and sum(of_files(config).values()) > bound


def summary(costs: dict[str, float]) -> list[str]:
    dearest = sorted(costs.items(), key=lambda cost: (-cost[1], cost[0]))[:NUM_DEAREST]
    return [
        f"{sum(costs.values()):.0f} CPU seconds in {len(costs)} files, most of them in:",
        *(f"{seconds:6.0f}  {name}" for name, seconds in dearest),
    ]
